"""Rows as a Parquet file, in row groups of bounded size. Needs pyarrow, of the extra ``reasoner[parquet]``."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from reasoner.training_data.formats import FORMATS

if TYPE_CHECKING:
    import pyarrow
    from typing_extensions import Buffer

ROW_GROUP_BYTES = 1 << 20
"""Size of the rows of a row group, as JSON."""
SUMMARY_KEY = "reasoner.summary"
"""Key in the file's metadata of the numbers of jobs and rows (JSON)."""


class MissingParquet(Exception):
    """pyarrow is not installed; the message says how to install it."""


class ParquetRows:
    """Turns rows of one format into the bytes of a Parquet file, a row group at a time."""

    def __init__(self, format: str) -> None:
        """Raises ``MissingParquet``."""
        load_pyarrow()
        import pyarrow.parquet

        self._schema = pyarrow.schema(make_fields(FORMATS[format].row))
        self._sink = _Sink()
        self._writer = pyarrow.parquet.ParquetWriter(self._sink, self._schema, compression="zstd")
        self._rows: list[Mapping[str, Any]] = []
        self._num_bytes = 0

    @property
    def is_full(self) -> bool:
        """True if the rows so far are enough for a row group."""
        return self._num_bytes >= ROW_GROUP_BYTES

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep rows for the next row group."""
        self._rows += rows
        self._num_bytes += sum(len(json.dumps(row)) for row in rows)

    def flush(self) -> bytes:
        """Return the next bytes of the file, with the rows that are kept as a row group."""
        import pyarrow

        if self._rows:
            self._writer.write_table(pyarrow.Table.from_pylist(self._rows, schema=self._schema))
        self._rows, self._num_bytes = [], 0
        return self._sink.take()

    def close(self, summary: Mapping[str, Any]) -> bytes:
        """Return the last bytes of the file, with the rest of the rows and its summary."""
        rows = self.flush()
        self._writer.add_key_value_metadata({SUMMARY_KEY: json.dumps(summary)})
        self._writer.close()
        return rows + self._sink.take()


class _Sink(io.RawIOBase):
    """A file that counts what is written and keeps it until it is taken."""

    def __init__(self) -> None:
        super().__init__()
        self._pending = bytearray()
        self._num_taken = 0

    def writable(self) -> bool:
        return True

    def write(self, content: Buffer) -> int:
        before = len(self._pending)
        self._pending += memoryview(content)
        return len(self._pending) - before

    def tell(self) -> int:
        return self._num_taken + len(self._pending)

    def take(self) -> bytes:
        """Return what was written since the last call."""
        content = bytes(self._pending)
        self._num_taken += len(content)
        self._pending.clear()
        return content


def read_last_row(path: Path, format: str) -> tuple[str, float]:
    """Return the job of a file's last row, and its end. Raises ``MissingParquet``, and ``ValueError`` for a file with
    other columns, or without rows.
    """
    load_pyarrow()
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"it is no Parquet file: {error}") from None
    if file.schema_arrow.names != [field.name for field in make_fields(FORMATS[format].row)]:
        raise ValueError(f"it has other columns than the format {format}")
    if not file.metadata.num_rows:
        raise ValueError("it has no rows")
    last = file.read_row_group(file.num_row_groups - 1, columns=["job", "finished_at"])
    return last["job"][-1].as_py(), last["finished_at"][-1].as_py()


def load_pyarrow() -> None:
    """Import pyarrow. Raises ``MissingParquet``."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise MissingParquet(
            "Parquet files need pyarrow, which is not installed: pip install 'reasoner[parquet]', or take JSON Lines"
        ) from None


def make_fields(row: type) -> list[pyarrow.Field]:
    """Return the columns of a ``TypedDict`` as fields of Arrow."""
    import pyarrow

    return [pyarrow.field(name, _find_type(kind)) for name, kind in get_type_hints(row).items()]


def _find_type(kind: Any) -> pyarrow.DataType:
    """Return the type of Arrow for a type annotation; in Arrow any value may be null."""
    import pyarrow

    if is_typeddict(kind):
        return pyarrow.struct(make_fields(kind))
    if get_origin(kind) in (Union, UnionType, NotRequired):
        return _find_type(next(part for part in get_args(kind) if part is not type(None)))
    if get_origin(kind) is list:
        return pyarrow.list_(_find_type(get_args(kind)[0]))
    scalars = {str: pyarrow.string(), float: pyarrow.float64(), int: pyarrow.int64(), bool: pyarrow.bool_()}
    return scalars[kind]

"""Uploads of one file in ``multipart/form-data``, written to disk as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from api.http.problems import Problem

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks  # not there at run time

MAX_FIELD_BYTES = 4096
"""Length of a field's name or value."""
MAX_FIELDS = 16
OVERHEAD_BYTES = 64 << 10
"""Bytes of a body besides the file."""
_CHUNK_BYTES = 1 << 20
_FILE = "file"


@dataclass(slots=True)
class Upload:
    """The parts of a body: the file's name and length, and the other fields."""

    filename: str = ""
    num_bytes: int = 0
    fields: dict[str, str] = field(default_factory=dict)


async def receive_upload(chunks: AsyncIterator[bytes], content_type: str, path: Path, max_bytes: int) -> Upload:
    """Write the body's part ``file`` to ``path``, and return its name with the other parts.

    Raises ``Problem`` for a body that is no such form, and for a file of more than ``max_bytes``.
    """
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise _refuse("send multipart/form-data, with a part 'file' that has a file name")
    with path.open("xb") as target:
        receiver = _Receiver(target, max_bytes)
        try:
            parser = MultipartParser(options[b"boundary"], receiver.callbacks)
            pending = bytearray()
            async for chunk in chunks:
                pending += chunk
                if len(pending) >= _CHUNK_BYTES:
                    await asyncio.to_thread(parser.write, bytes(pending))
                    pending.clear()
            await asyncio.to_thread(parser.write, bytes(pending))
            await asyncio.to_thread(target.flush)
        except FormParserError as error:
            raise _refuse(f"the body is not multipart/form-data: {error}") from None
    if not receiver.has_ended:
        raise _refuse("the body breaks off before its last boundary")
    if not receiver.has_file:
        raise _refuse("there is no part 'file' with a file name")
    return receiver.upload


class _Receiver:
    """Callbacks of the parser, for one body."""

    def __init__(self, target: BinaryIO, max_bytes: int) -> None:
        self.upload = Upload()
        self.has_file = self.has_ended = False
        self._target = target
        self._max_bytes = max_bytes
        self._headers: dict[bytes, bytes] = {}
        self._header_name = self._header_value = self._value = b""
        self._name = ""
        self.callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin_part,
            "on_header_field": self._read_header_name,
            "on_header_value": self._read_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._read_data,
            "on_part_end": self._end_part,
            "on_end": self._end_body,
        }

    def _begin_part(self) -> None:
        self._headers, self._value = {}, b""

    def _read_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _read_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def _end_headers(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition"))
        if kind != b"form-data" or b"name" not in options:
            raise _refuse("a part has no name: give each a Content-Disposition with one")
        self._name = options[b"name"].decode(errors="replace")
        if self._name in self.upload.fields or (self._name == _FILE and self.has_file):
            raise _refuse(f"the part {self._name!r} comes twice")
        if len(self.upload.fields) == MAX_FIELDS:
            raise _refuse(f"there are more than {MAX_FIELDS} parts")
        if self._name == _FILE:
            filename = _read_filename(self._headers[b"content-disposition"], options)
            if filename is None:
                raise _refuse("the part 'file' has no file name: send it as a file, not as a text")
            self.has_file, self.upload.filename = True, filename

    def _read_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == _FILE:
            self.upload.num_bytes += end - start
            if self.upload.num_bytes > self._max_bytes:
                message = f"the file is larger than the limit of {self._max_bytes} bytes"
                raise Problem(413, "file-too-large", message, errors=[(_FILE, message)])
            self._target.write(memoryview(data)[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise _refuse(f"the part {self._name!r} has more than {MAX_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if self._name != _FILE:
            self.upload.fields[self._name] = self._value.decode(errors="replace")

    def _end_body(self) -> None:
        self.has_ended = True


def _read_filename(header: bytes, options: Mapping[bytes, bytes]) -> str | None:
    """Return the file's name; some clients send it as ``filename*`` alone (RFC 5987), which forms should not have."""
    if b"filename" in options:
        return options[b"filename"].decode(errors="replace")
    message = Message()
    message["Content-Disposition"] = header.decode("latin-1")
    return message.get_filename()


def _refuse(message: str) -> Problem:
    return Problem(400, "invalid-upload", message, errors=[(_FILE, message)])

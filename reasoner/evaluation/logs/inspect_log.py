"""Logs of Inspect: ``.eval``, a ZIP archive with ``header.json`` and ``samples/ID_epoch_N.json``, and ``.json``.

Both have ``version`` (2), ``status`` and ``eval``; a sample has ``id``, ``epoch``, ``input``, ``target``, ``output``
with ``choices``, and ``attachments``, by whose hash long texts are named. The epochs of a sample, and the choices of
each, are its candidates. Source: ``inspect_ai/log/_log.py`` and ``inspect_ai/log/_recorders`` of 0.3.285.
"""

from __future__ import annotations

import importlib
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reasoner.evaluation.logs.log_format import LabelledCandidates, SameCount, check_candidates, read_right_answer
from reasoner.evaluation.suites.files.records import Record
from reasoner.evaluation.suites.suite import SuiteError

VERSION = 2
"""The only version of the log's schema since 2024; the first had other fields."""
MAX_MEMBER_BYTES = 256 << 20
"""Largest member of an archive that is unpacked."""
_ZSTANDARD = 93
"""Compression method of newer archives (APPNOTE 6.3.8)."""
_LOCAL_HEADER_BYTES = 30
_ATTACHMENT = "attachment://"


def read_log(path: Path, limit: int | None) -> list[LabelledCandidates]:
    """Return the first samples of a log with the candidates of all epochs. Raises ``SuiteError``."""
    try:
        header, samples = _read_archive(path) if path.suffix == ".eval" else _read_json(path)
        _check_header(header)
        return _join_epochs(header, samples, path.stem)[:limit]
    except OSError as error:
        raise SuiteError(f"{path}: {error.strerror or error}") from None


def is_log(path: Path) -> bool:
    """Return True for an archive of Inspect by its name, and for a JSON document with the fields of a log."""
    if path.suffix != ".json":
        return path.suffix == ".eval"
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False  # whoever reads it as lines says what is wrong
    return isinstance(document, dict) and {"version", "eval"} <= document.keys()


def _read_json(path: Path) -> tuple[Record, Iterator[Record]]:
    header = _make_record(str(path), 0, json.loads(path.read_bytes()))
    samples = header.fields.get("samples")
    if not isinstance(samples, list):
        raise header.refuse("samples", "it must be a list: a log of headers alone has no candidates")
    return header, (_make_record(f"{path}, samples[{at}]", at + 1, sample) for at, sample in enumerate(samples))


def _read_archive(path: Path) -> tuple[Record, Iterator[Record]]:
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise SuiteError(f"{path}: no archive of Inspect ({error}); was it copied completely?") from None
    members = {info.filename: info for info in archive.infolist()}
    if "header.json" not in members:
        begun = "the run has not ended" if "_journal/start.json" in members else "it is no log of Inspect"
        raise SuiteError(f"{path}: 'header.json' is missing: {begun}")

    def read(name: str, number: int) -> Record:
        where = f"{path}, {name}"
        try:
            return _make_record(where, number, json.loads(_unpack(path, archive, members[name])))
        except (ValueError, zipfile.BadZipFile) as error:
            if isinstance(error, SuiteError):
                raise
            raise SuiteError(f"{where}: not JSON ({error})") from None

    names = sorted(name for name in members if name.startswith("samples/") and name.endswith(".json"))
    return read("header.json", 0), (read(name, number) for number, name in enumerate(names, 1))


def _unpack(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Return a member of an archive, also one that is compressed by Zstandard, which ``zipfile`` knows since 3.14."""
    if member.file_size > MAX_MEMBER_BYTES:
        raise SuiteError(
            f"{path}, {member.filename}: {member.file_size} bytes; at most {MAX_MEMBER_BYTES} are unpacked"
        )
    try:
        return archive.read(member)
    except NotImplementedError:
        if member.compress_type != _ZSTANDARD:
            raise SuiteError(f"{path}, {member.filename}: compression {member.compress_type} is not known") from None
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:
        raise SuiteError(
            f"{path}: compressed by Zstandard: pip install zstandard, or 'inspect log convert {path.name} --to json'"
        ) from None
    with path.open("rb") as file:
        file.seek(member.header_offset)
        header = file.read(_LOCAL_HEADER_BYTES)
        file.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), 1)
        packed = file.read(member.compress_size)
    try:
        with zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True) as stream:
            content: bytes = stream.read(MAX_MEMBER_BYTES + 1)
    except zstandard.ZstdError as error:
        raise SuiteError(f"{path}, {member.filename}: damaged ({error})") from None
    if len(content) != member.file_size:
        raise SuiteError(f"{path}, {member.filename}: {len(content)} bytes instead of {member.file_size}")
    return content


def _make_record(where: str, number: int, fields: Any) -> Record:
    if not isinstance(fields, dict):
        raise SuiteError(f"{where}: {type(fields).__name__} instead of a JSON object")
    return Record(where, number, fields)


def _check_header(header: Record) -> None:
    """Raise ``SuiteError`` for a log of another version, and for a run that has not ended well."""
    version = header.read("version", f"the version of the log, {VERSION}")
    if version != VERSION:
        raise header.refuse(
            "version", f"{version!r} is not known; known is {VERSION}: convert it with 'inspect log convert'"
        )
    status = header.read("status", "the status of the run")
    if status != "success":
        raise header.refuse("status", f"{status!r}: samples may be missing; only logs of runs with 'success' are read")


def _join_epochs(header: Record, samples: Iterator[Record], title: str) -> list[LabelledCandidates]:
    """Return a question for each sample. Raises ``SuiteError`` if an epoch is missing or there twice."""
    config = header.fields["eval"].get("config") if isinstance(header.fields["eval"], dict) else None
    epochs = config.get("epochs") if isinstance(config, dict) else None
    by_id: dict[str, dict[int, Record]] = {}
    for record in samples:
        name, epoch = _read_place(record)
        known = by_id.setdefault(name, {})
        if epoch in known:
            raise record.refuse(
                "epoch", f"epoch {epoch} of sample {name!r} is there twice, also at {known[epoch].where}"
            )
        known[epoch] = record
    questions, same = [], SameCount()
    for name, runs in by_id.items():
        last = next(reversed(runs.values()))
        missing = set(range(1, (epochs or max(runs)) + 1)) - runs.keys()
        if missing:
            raise last.refuse("epoch", f"sample {name!r} lacks epoch {min(missing)} of {epochs or max(runs)}")
        texts = [text for epoch in sorted(runs) for text in _read_choices(runs[epoch])]
        same.add(last, "id", name, len(texts))
        gold = _read_target(last)
        questions.append(LabelledCandidates(f"{title}-{name}", _read_input(last), texts, gold))
    return questions


def _read_place(record: Record) -> tuple[str, int]:
    name, epoch = record.read("id", "the id of the sample"), record.read("epoch", "the number of the epoch")
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise record.refuse("id", f"{name!r} must be a text or a number")
    if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 1:
        raise record.refuse("epoch", f"{epoch!r} must be a number from 1")
    if record.fields.get("error") is not None:
        raise record.refuse("error", f"sample {name!r} failed in epoch {epoch}, so that it has no candidate there")
    return str(name), epoch


def _read_input(record: Record) -> str:
    given = record.read("input", "the question, a text or messages")
    if isinstance(given, list):
        asked = [message for message in given if isinstance(message, dict) and message.get("role") == "user"]
        given = "\n\n".join(_read_content(record, "input", message) for message in asked)
    if not isinstance(given, str) or not given.strip():
        raise record.refuse("input", "it must be a text, or have a user's message")
    return _resolve(record, given).strip()


def _read_target(record: Record) -> str:
    target = record.read("target", "the right answer")
    if isinstance(target, list):
        if len(target) != 1:
            raise record.refuse("target", f"{len(target)} targets; a question has one right answer")
        target = target[0]
    return read_right_answer(record, "target", _resolve(record, target) if isinstance(target, str) else target)


def _read_choices(record: Record) -> list[str]:
    output = record.read("output", "what the model answered")
    choices = output.get("choices") if isinstance(output, dict) else None
    if not isinstance(choices, list) or not choices:
        raise record.refuse("output", "it must have 'choices', the answers of the model")
    messages = [choice.get("message") if isinstance(choice, dict) else None for choice in choices]
    texts = [_read_content(record, f"output.choices.{at}.message", message) for at, message in enumerate(messages)]
    return check_candidates(record, "output.choices", texts)


def _read_content(record: Record, field: str, message: Any) -> str:
    """Return the text of a message; reasoning stands in front of it between tags."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        return _resolve(record, content)
    if not isinstance(content, list):
        raise record.refuse(field, "it must have 'content', a text or a list of parts")
    pieces = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                pieces.append(_resolve(record, text))
            case {"type": "reasoning", "reasoning": str(text)}:
                pieces.append(f"<think>\n{_resolve(record, text)}\n</think>\n\n")
            case _:
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise record.refuse(field, f"a part of type {kind!r}: only text and reasoning are read")
    return "".join(pieces)


def _resolve(record: Record, text: str) -> str:
    """Return a text, or the attachment that it names."""
    if not text.startswith(_ATTACHMENT):
        return text
    attachments = record.fields.get("attachments")
    found = attachments.get(text.removeprefix(_ATTACHMENT)) if isinstance(attachments, dict) else None
    if not isinstance(found, str):
        raise record.refuse("attachments", f"{text!r} is missing")
    return found

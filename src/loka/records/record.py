"""Records: typed values saved as JSON.

Every record kind is a frozen struct with a `kind` tag and a schema version, so that a file identifies itself:

    {"kind": "plan", "schema": 2, ...}

Reading is strict. A wrong type, an unknown, missing or duplicate field, another kind, a newer schema, a truncated or
damaged file: each raises RecordError naming the file and the field. A file of an older schema is rejected, too: it is
made again. Writing is atomic (temporary file, fsync, rename): a crash leaves the old file. What could not be read back
is rejected before anything is written. JSON has no NaN or infinity, so numbers must be finite; None stands for what was
not measured.

Decoding uses msgspec rather than the standard library: it validates types while parsing, and its errors carry the path
of the field.
"""

import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec


class RecordError(ValueError):
    """An invalid record. The message names the file and the field, and says what was expected."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=False):
    """A part of a record: strict and frozen, but not a file of its own."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag=str.lower):
    """A record with a file of its own. If fields change meaning, bump both `SCHEMA` and the default of `schema`."""

    SCHEMA: ClassVar[int] = 1
    schema: int = 1

    def __post_init__(self) -> None:
        if self.schema != self.SCHEMA:
            raise ValueError(f"schema {self.schema} of {type(self).__name__} is not {self.SCHEMA}")


R = TypeVar("R", bound=Record)


def to_json(record: Record) -> bytes:
    """Encode a record as one line of JSON that `from_json` reads back.

    Args:
        record: the record.

    Returns:
        UTF-8 encoded JSON.

    Raises:
        RecordError: a field of the wrong type, or a number that is not finite.

    Example:
        >>> to_json(plan)[:15]
        b'{"kind":"plan",'
    """
    source = type(record).__name__.lower()
    _require_finite(record, source)
    try:
        data = msgspec.json.encode(record)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RecordError(f"{source}: cannot be written: {error}") from error
    from_json(data, type(record), source=source)  # msgspec checks types only when it reads
    return data


def from_json(data: bytes | str, kind: type[R], *, source: str = "record") -> R:
    """Decode a record of a known kind.

    Args:
        data: JSON.
        kind: the record's class.
        source: name of the data in error messages.

    Returns:
        The record.

    Raises:
        RecordError: the data is invalid; the message names the source and the field.

    Example:
        >>> from_json(to_json(plan), Plan) == plan
        True
    """
    try:
        header = msgspec.json.decode(data)
        _refuse_duplicates(data, source)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RecordError(f"{source}: not valid JSON ({error}); the file is truncated or damaged") from error
    _check_header(header, kind, source)
    try:
        return msgspec.convert(header, kind)
    except msgspec.ValidationError as error:
        raise RecordError(f"{source}: {_describe(error)}") from error


def _refuse_duplicates(data: bytes | str, source: str) -> None:
    """Raise RecordError if a field is given twice, e.g. after a bad merge: msgspec would silently use the last one."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise RecordError(f"{source}: field `{twice}` is given {names.count(twice)} times in one object")

    json.loads(data, object_pairs_hook=check)


def _check_header(header: Any, kind: type[Record], source: str) -> None:
    if not isinstance(header, dict):
        raise RecordError(f"{source}: expected a JSON object, got {type(header).__name__}")
    expected = kind.__struct_config__.tag
    if header.get("kind") != expected:
        raise RecordError(f"{source}: field `kind` is {header.get('kind')!r}, expected {expected!r}")
    schema = header.get("schema")
    if schema != kind.SCHEMA or isinstance(schema, bool):
        newer = type(schema) is int and schema > kind.SCHEMA
        hint = "written by a newer loka; upgrade" if newer else "make it again"
        raise RecordError(f"{source}: field `schema` is {schema!r}, this loka reads {kind.SCHEMA}; {hint}")


def _describe(error: msgspec.ValidationError) -> str:
    """Format msgspec's message with the path first: "field `$.sites[0].k`: Expected `int`, got `str`"."""
    message, _, path = str(error).rpartition(" - at ")
    return f"field {path}: {message}" if message else str(error)


def _require_finite(value: Any, path: str) -> None:
    """Raise RecordError for numbers that are not finite: msgspec writes NaN as null, which means "not measured"."""
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise RecordError(f"{path} is {value}; records hold finite numbers, and None for what was not measured")
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            _require_finite(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, dict):
        for key, item in value.items():
            _require_finite(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_finite(item, f"{path}[{index}]")


def save(record: Record, path: str | Path) -> None:
    """Write a record as indented JSON, atomically.

    Args:
        record: the record.
        path: the file; missing folders are created.

    Example:
        >>> save(conversion, "conversion.json")
    """
    write_atomically(path, msgspec.json.format(to_json(record), indent=1) + b"\n")


def load(path: str | Path, kind: type[R]) -> R:
    """Read a record file of a known kind.

    Args:
        path: a file written by `save`.
        kind: the record's class.

    Returns:
        The record.

    Raises:
        RecordError: the file is invalid; the message names the file and the field.

    Example:
        >>> load("probe.json", ProbeReport).model
    """
    return from_json(_read(path), kind, source=str(path))


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Replace a file atomically when the block ends. If the block raises, the file is left unchanged.

    Args:
        path: the file to replace; missing folders are created.

    Returns:
        A context manager that gives the path of a temporary file in the same folder, to be written in the block.

    Example:
        >>> with replacing("notes.txt") as temporary:
        ...     written = temporary.write_text("all of it, or nothing")
    """
    path = Path(path).resolve()  # replace the target of a symbolic link, not the link
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        temporary.touch()
        mode = (path if path.exists() else temporary).stat().st_mode
        yield temporary
        temporary.chmod(stat.S_IMODE(mode))  # safetensors makes files that only their owner can read
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if (number := _disk_error(error, temporary)) is not None:
            raise OSError(number, os.strerror(number), str(path)) from error  # not the name of the temporary file
        raise


def _disk_error(error: BaseException, temporary: Path) -> int | None:
    """Return the errno of an error in writing a file: of Python, which may name no file, or of safetensors."""
    if isinstance(error, OSError) and error.filename in (None, str(temporary)):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error)) if type(error).__name__ == "SafetensorError" else None
    return None if found is None else int(found[1])


def write_atomically(path: str | Path, data: bytes) -> None:
    """Replace a file's content atomically: readers see the old or the new content, never a part of it.

    Args:
        path: the file; missing folders are created.
        data: the whole content.

    Example:
        >>> write_atomically("result.json", b"{}")
    """
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error

"""What rooms write down: typed values that survive as JSON.

Every record kind is a frozen struct with a `kind` tag and a schema version, so that a file says what it is before it is believed:

    {"kind": "plan", "schema": 2, ...}

A file of an older schema is read where its kind knows how (`upgrade`), and otherwise refused with what to do. Reading is strict. A wrong type, an unknown field, a missing field, a field given twice, another kind, a newer schema, a truncated or
damaged file: each raises RecordError naming the file and the field. Writing is atomic (temporary file, fsync, rename): a crash leaves the
old file; and what could not be read back is refused before anything is written. JSON has no NaN or infinity, so numbers must be finite;
what was not measured is None.

msgspec does the decoding rather than the standard library: it validates types while it parses and its errors carry the path of the field,
which a hand-written dataclass walker would have to reinvent.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec


class RecordError(ValueError):
    """A record file that cannot be believed: which file, which field, what was expected."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=False):
    """A piece of a record: strict and frozen, but not a file of its own."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag=str.lower):
    """A file of its own. A subclass whose fields change meaning bumps `SCHEMA` and the default of `schema`, together."""

    SCHEMA: ClassVar[int] = 1
    schema: int = 1

    def __post_init__(self) -> None:
        if self.schema != self.SCHEMA:
            raise ValueError(f"schema {self.schema} of {type(self).__name__} is not {self.SCHEMA}")

    @classmethod
    def upgrade(cls, document: dict[str, Any]) -> None:
        """Rewrite a document of an older schema in place; a kind that cannot raises ValueError with what to do instead.

        Args:
            document: as decoded from JSON, this record alone.
        """
        raise ValueError("make it again")


R = TypeVar("R", bound=Record)


def to_json(record: Record) -> bytes:
    """One line of JSON that `from_json` reads back.

    Args:
        record: any.

    Returns:
        UTF-8.

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
    from_json(data, type(record), source=source)  # msgspec checks types when it reads: do so before a file is replaced
    return data


def from_json(data: bytes | str, kind: type[R], *, source: str = "record") -> R:
    """Read one record of a known kind.

    Args:
        data: JSON.
        kind: its class.
        source: what errors call it.

    Returns:
        The record.

    Raises:
        RecordError: which source, which field, what was expected.

    Example:
        >>> from_json(to_json(plan), Plan) == plan
        True
    """
    try:
        header = msgspec.json.decode(data)
        _refuse_duplicates(data, source)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RecordError(f"{source}: not valid JSON ({error}); the file is truncated or damaged") from error
    if isinstance(header, dict) and header.get("kind") == kind.__struct_config__.tag:
        known: list[type[Record]] = [*_kinds(), kind]
        _upgrade(header, {each.__struct_config__.tag: each for each in known}, source)
    _check_header(header, kind, source)
    try:
        return msgspec.convert(header, kind)
    except msgspec.ValidationError as error:
        raise RecordError(f"{source}: {_describe(error)}") from error


def _refuse_duplicates(data: bytes | str, source: str) -> None:
    """A field given twice, as a badly merged file has it: msgspec would take the last one without a word."""

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
        raise RecordError(f"{_unread(kind, schema, source)}; make it again")


def _kinds(kind: type[Record] = Record) -> Iterator[type[Record]]:
    for each in kind.__subclasses__():
        yield each
        yield from _kinds(each)


def _unread(kind: type[Record], schema: Any, where: str) -> str:
    return f"{where}: field `schema` is {schema!r}, this loka reads {kind.SCHEMA}"


def _upgrade(value: Any, kinds: dict[Any, type[Record]], where: str) -> None:
    """Bring a document, and the records inside it, to the schema of this version."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            _upgrade(item, kinds, f"{where}[{index}]")
    if not isinstance(value, dict):
        return
    name, schema = value.get("kind"), value.get("schema")
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is not None and type(schema) is int and schema != kind.SCHEMA:
        if schema > kind.SCHEMA:
            raise RecordError(f"{_unread(kind, schema, where)}; written by a newer loka; upgrade")
        try:
            kind.upgrade(value)
        except ValueError as error:
            raise RecordError(f"{_unread(kind, schema, where)}; {error}") from error
        value["schema"] = kind.SCHEMA
    for key, item in value.items():
        _upgrade(item, kinds, f"{where}.{key}")


def _describe(error: msgspec.ValidationError) -> str:
    """msgspec's message with the path first: "field `$.sites[0].k`: Expected `int`, got `str`"."""
    message, _, path = str(error).rpartition(" - at ")
    return f"field {path}: {message}" if message else str(error)


def _require_finite(value: Any, path: str) -> None:
    """msgspec writes NaN as null, which would read back as 'not measured': refuse instead."""
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
        record: any.
        path: of the file; its folder is made where it is missing.

    Example:
        >>> save(conversion, "conversion.json")
    """
    write_atomically(path, msgspec.json.format(to_json(record), indent=1) + b"\n")


def load(path: str | Path, kind: type[R]) -> R:
    """Read a record file of a known kind.

    Args:
        path: what `save` wrote.
        kind: its class.

    Returns:
        The record.

    Raises:
        RecordError: which file, which field, what was expected.

    Example:
        >>> load("probe.json", ProbeReport).model
    """
    return from_json(_read(path), kind, source=str(path))


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path to write to that replaces a file in one step when the block ends; where the block raises, nothing changes.

    Args:
        path: of the file; its folder is made where it is missing.

    Returns:
        A context with the path of a temporary file beside it.

    Example:
        >>> with replacing("model.safetensors") as temporary:
        ...     save_file(tensors, temporary)
    """
    path = Path(path).resolve()  # through a symbolic link: the link stays
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")  # not mkstemp, whose files nobody else may read
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: str | Path, data: bytes) -> None:
    """Replace a file's content in one step: readers see the old or the new, never a part.

    Args:
        path: of the file; its folder is made where it is missing.
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

"""Decode requests and encode answers: JSON or MessagePack by content type, strictly typed.

An invalid body raises Refused with status 400 and the path of the field; an unsupported content type is a 415. msgspec
checks types, bounds and unknown fields while it parses. The Open Inference Protocol is in loka.serving.v2.
"""

import re
from collections.abc import Iterable
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from loka.serving.runner import Refused
from loka.serving.servable import FieldError

JSON = "application/json"
MSGPACK = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
UNNAMED = re.compile(r"\$\.(\w+)\[\.\.\.\]")  # how msgspec calls an entry of a mapping
NAMED = 256 * 1024  # bytes of a body that is parsed once more to name the entry
SMALLEST, LARGEST = -(2**63), 2**64 - 1  # of 64 bits, with a sign and without
TOO_LARGE = "an integer of more than 64 bits"
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Codec:
    """Decode requests of one type.

    Example:
        >>> codec = Codec(RecommendRequest)                                             # doctest: +SKIP
        >>> codec.decode(b'{"history": [1, 2]}', "application/json")                    # doctest: +SKIP
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._json: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)
        self._msgpack: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)

    def decode(self, body: bytes, content_type: str) -> Any:
        """Decode a request; raises Refused."""
        decoder = self._json if content_type == JSON else self._msgpack
        try:
            made = decoder.decode(body)
        except msgspec.ValidationError as error:
            raise self._name_entry(blame(error), body, content_type) from error
        except (ValueError, RecursionError) as error:  # DecodeError is a ValueError
            raise Refused(400, "malformed", f"the body is not valid {content_type}: {error}", path="$") from error
        try:
            check_integers(made)
        except FieldError as error:
            raise blame(error) from error
        return made

    def _name_entry(self, refused: Refused, body: bytes, content_type: str) -> Refused:
        """Replace `[...]`, which stands for some entry of a mapping, by the name of the first invalid one."""
        found = UNNAMED.match(refused.path or "")
        if found is None or len(body) > NAMED:
            return refused
        mapping = get_type_hints(self._kind, include_extras=True)[found[1]]
        _, kind = get_args(get_args(mapping)[0] if get_origin(mapping) is Annotated else mapping)
        read = msgspec.json.decode if content_type == JSON else msgspec.msgpack.decode
        try:
            entries = read(body, type=dict[str, Any])[found[1]]
        except (ValueError, RecursionError):  # more than this field is invalid, behind it
            return refused
        for name, value in entries.items() if isinstance(entries, dict) else ():  # a field may be given twice
            try:
                msgspec.convert(value, kind)
            except msgspec.ValidationError as error:
                inner = blame(error)
                hint = (
                    "; expected numbers, or base64 of their bytes"
                    if inner.message.endswith("base64 encoded string")
                    else ""
                )
                return Refused(400, "field", inner.message + hint, path=f"$.{found[1]}.{name}{(inner.path or '$')[1:]}")
        return refused


def check_integers(request: Any) -> None:
    """Refuse integers of more than 64 bits, by a FieldError: JSON has them, MessagePack and the models have not."""
    for name in request.__struct_fields__:
        value = getattr(request, name)
        numbers = value if isinstance(value, list) else [value]
        if not numbers or type(numbers[0]) is not int or (min(numbers) >= SMALLEST and max(numbers) <= LARGEST):
            continue
        place = next(i for i, one in enumerate(numbers) if not SMALLEST <= one <= LARGEST)
        raise FieldError(f"$.{name}[{place}]" if numbers is value else f"$.{name}", TOO_LARGE)


def blame(error: Exception) -> Refused:
    """Turn the error of an invalid field into the response to the client."""
    if isinstance(error, FieldError):
        return Refused(400, "field", error.message, path=error.path)
    message, _, path = str(error).rpartition(" - at ")
    return Refused(400, "field", message or str(error), path=path.strip("`") if message else "$")


def content_type(value: str | None, encoding: str | None) -> str:
    """Return the content type without its parameters; raises Refused with 415."""
    kind = (value or "").partition(";")[0].strip().lower()
    if kind != JSON and kind not in MSGPACK:
        seen = f"content type {kind!r}" if kind else "no content type"
        raise Refused(415, "content-type", f"{seen}; expected {JSON} or {MSGPACK[0]}")
    check_encoding(encoding)
    return kind


def check_encoding(encoding: str | None) -> None:
    """Refuse a compressed body, with 415."""
    if encoding and encoding.strip().lower() != "identity":
        raise Refused(415, "content-encoding", "compressed bodies are not supported")


def check_transfer(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse a body in a transfer coding other than `chunked`, with 501: servers decode no other."""
    given = b",".join(value for name, value in headers if name == b"transfer-encoding").decode("latin-1")
    codings = [coding.strip().lower() for coding in given.split(",") if coding.strip()]
    if codings not in ([], ["chunked"]):
        raise Refused(501, "transfer-encoding", f"{given!r} is not supported; expected chunked, or a content-length")


def encode(value: Any, kind: str) -> bytes:
    """Encode an answer in the content type of its request."""
    return msgspec.msgpack.encode(value) if kind in MSGPACK else msgspec.json.encode(value)


def error_body(refused: Refused, request_id: str) -> dict[str, Any]:
    """Return the body of an error response."""
    error: dict[str, Any] = {"reason": refused.reason, "message": refused.message}
    if refused.path is not None:
        error["path"] = refused.path
    if refused.retry_after is not None:
        error["retry_after_ms"] = round(1e3 * refused.retry_after, 1)
    return {"error": error, "request_id": request_id}

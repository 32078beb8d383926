"""Decode requests and encode answers: JSON or MessagePack by content type, strictly typed.

An invalid body raises Refused with status 400 and the path of the field; an unsupported content type is a 415. msgspec
checks types, bounds and unknown fields while it parses. The Open Inference Protocol is in loka.serving.v2.
"""

import re
from typing import Any

import msgspec

from loka.serving.runner import Refused
from loka.serving.servable import FieldError

JSON = "application/json"
MSGPACK = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Codec:
    """Decode requests of one type.

    Example:
        >>> codec = Codec(RecommendRequest)                                             # doctest: +SKIP
        >>> codec.decode(b'{"history": [1, 2]}', "application/json")                    # doctest: +SKIP
    """

    def __init__(self, kind: type) -> None:
        self._json: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)
        self._msgpack: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)

    def decode(self, body: bytes, content_type: str) -> Any:
        """Decode a request; raises Refused."""
        decoder = self._json if content_type == JSON else self._msgpack
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            raise blame(error) from error
        except (ValueError, RecursionError) as error:  # DecodeError is a ValueError
            raise Refused(400, "malformed", f"the body is not valid {content_type}: {error}", path="$") from error


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
    if encoding and encoding.strip().lower() != "identity":
        raise Refused(415, "content-encoding", "compressed bodies are not supported")
    return kind


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

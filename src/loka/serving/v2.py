"""The Open Inference Protocol, version 2, over HTTP, for clients of KServe and Triton.

Tensors are given by name, as JSON or in binary after a JSON header:

    POST /v2/models/NAME/infer      {"inputs": [{"name", "shape", "datatype", "data"}], "outputs": [], "parameters": {}}
    Inference-Header-Content-Length: n      the first n bytes are JSON; the tensors with a parameter `binary_data_size`
                                            follow, in order

One inference request is one request to the model. Parameters are the other fields of its request (top, timeout_ms,
user, ...).
"""

import math
import re
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from loka.serving.runner import Refused
from loka.serving.servable import FieldError, Servable
from loka.serving.wire import blame, check_integers

DTYPES = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2",
    "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
FITTING = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}  # kinds of NumPy's types that JSON may have for another
WORDS = {np.dtype(code): word for word, code in DTYPES.items()}
FIELD = re.compile(r"\$\.([^.\[]+)(.*)", re.DOTALL)  # a field of the model's request, and what is in it
UNKNOWN = re.compile(r"unknown field `([^`.\[]+)`")
MOST = 4_000_000  # values of one tensor
# Parameters of the protocol or of its clients that are not fields of a request
CLIENTS_OWN = ("binary_data_output", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout")


class Input(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One input tensor."""

    name: Annotated[str, Meta(max_length=256)]
    shape: Annotated[list[Annotated[int, Meta(ge=0, le=MOST)]], Meta(max_length=8)]
    datatype: str
    parameters: dict[str, Any] = {}
    data: list[Any] | None = None


class Output(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One requested output tensor."""

    name: str
    parameters: dict[str, Any] = {}


class Infer(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The JSON of an inference request."""

    inputs: Annotated[list[Input], Meta(min_length=1, max_length=4096)]
    id: Annotated[str, Meta(max_length=128)] = ""
    outputs: Annotated[list[Output], Meta(max_length=4096)] = []
    parameters: dict[str, Any] = {}


_decoder = msgspec.json.Decoder(Infer)


def read(body: bytes, header_length: str | None, model: Servable) -> tuple[Infer, Any]:
    """Return the inference request, and the model's request made from it; raises Refused.

    Args:
        body: JSON, and binary tensors behind it.
        header_length: the length of the JSON, as a header says; None if it is all of the body.
        model: what the request is for.
    """
    try:
        size = len(body) if header_length is None else int(header_length)
        if not 0 < size <= len(body):
            raise ValueError(f"{size} of {len(body)} bytes")
    except ValueError as error:
        raise Refused(400, "header", f"Inference-Header-Content-Length: {error}") from error
    try:
        infer = _decoder.decode(body[:size])
        tensors = _tensors(infer, memoryview(body)[size:])
        try:
            return infer, _make_request(infer, tensors, model)
        except (msgspec.ValidationError, FieldError) as error:
            raise locate(blame(error), infer) from error
    except (msgspec.ValidationError, FieldError) as error:
        raise blame(error) from error
    except (ValueError, RecursionError) as error:
        raise Refused(400, "malformed", f"the header is not valid JSON: {error}", path="$") from error


def _make_request(infer: Infer, tensors: dict[str, Any], model: Servable) -> Any:
    """Return the model's request: tensors, and parameters as its other fields."""
    parameters = {name: value for name, value in infer.parameters.items() if name not in CLIENTS_OWN}
    request = model.from_tensors(tensors, parameters)
    check_integers(request)
    return request


def locate(refused: Refused, infer: Infer) -> Refused:
    """Return a refusal of the model's request with the path in the client's own body: of a parameter or an input."""
    unknown = UNKNOWN.search(refused.message) if refused.path == "$" else None  # msgspec names it in words only
    found = FIELD.match(f"$.{unknown[1]}" if unknown else refused.path or "")
    name, rest = found.groups() if found else ("", "")
    if name in ("", "inputs", "parameters"):  # these say it already
        return refused
    if name in infer.parameters:
        path = f"$.parameters.{name}{rest}"
    elif any(one.name == name for one in infer.inputs):
        path = f"$.inputs.{name}{rest}"
    elif name == "features":
        path = f"$.inputs{rest}"
    else:
        return refused
    return Refused(refused.status, refused.reason, refused.message, path=path, retry_after=refused.retry_after)


def _tensors(infer: Infer, rest: memoryview) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for place, one in enumerate(infer.inputs):
        path = f"$.inputs[{place}]"
        if one.datatype not in DTYPES:
            raise FieldError(f"{path}.datatype", f"{one.datatype!r}; expected one of {', '.join(DTYPES)}")
        if one.name in out:
            raise FieldError(f"{path}.name", f"{one.name!r} is given twice")
        kind, count = np.dtype(DTYPES[one.datatype]), math.prod(one.shape)
        if count > MOST:
            raise FieldError(f"{path}.shape", f"{count} values; a tensor may have {MOST}")
        size = one.parameters.get("binary_data_size")
        if size is not None:
            if type(size) is not int or size != count * kind.itemsize or size > len(rest) or one.data is not None:
                raise FieldError(
                    f"{path}.parameters.binary_data_size",
                    f"{size}; expected {count * kind.itemsize} of the {len(rest)} bytes left, and no data",
                )
            out[one.name] = np.frombuffer(rest[:size], kind).reshape(one.shape)
            rest = rest[size:]
            continue
        try:
            given = np.array(one.data or [])
            if given.size and given.dtype.kind not in FITTING[kind.kind]:  # NumPy would cut 1.7 to 1, and read "7"
                raise ValueError(f"has values of type {given.dtype.name}")
            array = np.array(one.data or [], dtype=kind).reshape(-1)
        except (ValueError, TypeError, OverflowError) as error:
            raise FieldError(f"{path}.data", f"is not {one.datatype}: {error}") from error
        if array.size != count:
            raise FieldError(f"{path}.data", f"{array.size} values for shape {one.shape}")
        out[one.name] = array.reshape(one.shape)
    if len(rest):
        raise FieldError("$.inputs", f"{len(rest)} bytes after the last tensor")
    return out


def write(infer: Infer, answer: Any, model: Servable, request_id: str) -> tuple[bytes, int | None]:
    """Return the response body, and the length of its JSON header if binary tensors follow it.

    Args:
        infer: the inference request, which may name the outputs it wants, and want them binary.
        answer: the model's answer.
        model: what has answered.
        request_id: goes into the response.
    """
    arrays = model.to_tensors(answer)
    wanted = {out.name: out for out in infer.outputs} or {name: Output(name=name) for name in arrays}
    missing = set(wanted) - set(arrays)
    if missing:
        raise Refused(
            400, "field", f"there is no output {sorted(missing)[0]!r}; there are {', '.join(arrays)}", path="$.outputs"
        )
    all_binary = bool(infer.parameters.get("binary_data_output"))
    outputs, blobs = [], []
    for name, out in wanted.items():
        array = np.ascontiguousarray(arrays[name])
        described: dict[str, Any] = {"name": name, "datatype": WORDS[array.dtype], "shape": list(array.shape)}
        if out.parameters.get("binary_data", all_binary):
            blobs.append(array.tobytes())
            described["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            described["data"] = array.reshape(-1).tolist()
        outputs.append(described)
    head = msgspec.json.encode(
        {"model_name": model.name, "model_version": model.version, "id": infer.id or request_id, "outputs": outputs}
    )
    return b"".join([head, *blobs]), len(head) if blobs else None


def metadata(model: Servable) -> dict[str, Any]:
    """Return the response of `GET /v2/models/NAME`."""
    return {"name": model.name, "versions": [model.version], "platform": "loka", **model.describe()}

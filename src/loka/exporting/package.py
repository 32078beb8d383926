"""Export a frozen model: trace it on an example, write it, load the file again and compare it with the model.

    aoti     torch.export, then AOTInductor: machine code and weights in one `.pt2`, which needs torch but no Python
             sources of the model or of loka
    onnx     torch.export, then ONNX with QuantizeLinear / DequantizeLinear; compared with onnxruntime on the CPU

Only a file that agrees with the model is moved to its place. Backends written in Python or Triton are not available
while the model is traced (`registry.offering`): others are chosen, or the trace fails with their name. An op of loka
that is left in the graph is an error that names the op and its module. The first dimension is dynamic unless the model
specializes on it, which is an error too.

The comparison is the relative L2 difference of the results. It is not zero: the compiler sums in another order, and a
value between two FP8 numbers may round to the other one.
"""

import contextlib
import io
import json
import logging
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from loka.exporting.agreement import CLOSE, Run, compare, differ, widest
from loka.exporting.ops import AtenOps, OnnxOps, Ops
from loka.exporting.plain import write_out
from loka.exporting.signature import (
    Arguments,
    Flat,
    can_be_made,
    flatten_result,
    name_left_out,
    name_parameters,
    name_results,
    take_apart,
)
from loka.exporting.trying import Tried
from loka.kernels import registry
from loka.measure.device import device_of
from loka.nn.wrapping import is_scripted, unwrap
from loka.records import write_atomically
from loka.records.prose import name_some
from loka.units.example import call_model, try_example
from loka.units.undisturbed import undisturbed

Format = Literal["aoti", "onnx"]
SUFFIXES: dict[str, Format] = {".pt2": "aoti", ".onnx": "onnx"}
PACKABLE = ("torch", "compiled", "reference")  # backends that consist of aten ops only
_MANY = 2**31 - 1  # rows; larger bounds come from the width of an index
_EVERYWHERE = ("aten", "prims", "prim", "higher_order", "onnx_symbolic")
_CHECKS = ("_assert_async", "_assert_scalar", "sym_constrain_range_for_size", "_assert_tensor_metadata")


@dataclass(frozen=True)
class Exported:
    """An exported file, verified against the model.

    Args:
        path: the file.
        format: aoti or onnx.
        inputs: names and shapes in the order of a call; `rows`, `n1`, ... are dynamic sizes.
        outputs: names of the results, in their order.
        low_precision: name -> what runs in FP8 there.
        difference: largest relative L2 difference from the model, over all results and compared sizes.
        rows: sizes of the first dimension that were compared.
        left_out: parts of the model's result that are no tensors, with their types: a file returns tensors only.
        moved: how far the model's own results move if its inputs are rounded differently; None if the file is closer
            than 0.01, or a tolerance was given.

    Example:
        >>> print(loka.export(model, example, "model.pt2"))
    """

    path: Path
    format: Format
    inputs: dict[str, str]
    outputs: list[str]
    low_precision: dict[str, str]
    difference: float
    rows: list[int]
    left_out: dict[str, str] = field(default_factory=dict)
    moved: float | None = None

    def __str__(self) -> str:
        sizes = " and ".join(map(str, self.rows))
        lines = [
            (
                f"{self.path}: {self.format}, {self.path.stat().st_size / 1e6:,.1f} MB; differs from the model by "
                f"{self.difference:.2g} (relative L2) at {sizes} rows"
            )
        ]
        if self.moved is not None:
            lines.append(
                f"  its own results move by {self.moved:.2g} if its inputs are rounded differently: "
                "FP8 layers multiply what flips"
            )
        lines += [f"  input {name}: {shape}" for name, shape in self.inputs.items()]
        lines += [f"  output {name}" for name in self.outputs]
        lines += [f"  not in the file: {name}, which is no tensor ({kind})" for name, kind in self.left_out.items()]
        return "\n".join([*lines, *(f"  FP8 {name}: {what}" for name, what in self.low_precision.items())])


@torch.no_grad()
def export(
    model: nn.Module,
    example: Any,
    path: str | Path,
    *,
    format: Format | None = None,
    dynamic: bool = True,
    tolerance: float | None = None,
) -> Exported:
    """Export a frozen model to one file that runs without loka.

    Args:
        model: a model in eval mode: converted with `freeze=True`, tuned with `target="serve"`, quantized, or in high
            precision. It is not changed.
        example: the arguments of one call: a tuple is *args, a dict **kwargs, anything else one argument. It must have
            two rows or more if `dynamic`.
        path: file to write, `.pt2` or `.onnx`.
        format: "aoti" or "onnx"; None: by the path's suffix.
        dynamic: make the first dimension of every input dynamic; False fixes all sizes to the example's.
        tolerance: largest accepted relative L2 difference from the model. None: 0.01, or how far the model's own
            results move if its inputs are rounded differently, which may be more in a deep FP8 model.

    Returns:
        What was written, and how much it differs from the model.

    Raises:
        ValueError: a part of the model cannot be exported, or the file computes something else. The message says what;
            no file is written.

    Example:
        >>> loka.convert(model, plan, freeze=True)
        >>> print(loka.export(model, inputs, "ranker.pt2"))
        >>> torch._inductor.aoti_load_package("ranker.pt2")(dense, categorical)  # anywhere
    """
    target, kind = Path(path), _find_format(Path(path), format)
    if tolerance is not None and not tolerance >= 0:  # also NaN, with which nothing would be compared
        raise ValueError(f"tolerance={tolerance}: expected 0 or more, such as 0.01")
    inner = unwrap(model)
    _check_model(inner)
    if kind == "onnx":
        _require_onnx()
    device = device_of(inner)
    dtype = next((p.dtype for p in inner.parameters() if p.is_floating_point()), torch.float32)
    arguments = take_apart(example, name_parameters(inner))
    ops: Ops = AtenOps(device) if kind == "aoti" else OnnxOps()
    with undisturbed(inner), _quiet(), tempfile.TemporaryDirectory() as folder:
        result = try_example(inner, example)
        expected, outputs = flatten_result(result), name_results(result)
        _check_results(expected, flatten_result(call_model(inner, example)), CLOSE if tolerance is None else tolerance)
        plain, written = write_out(inner, ops, dtype)
        with registry.offering(PACKABLE):  # only for the trace; the model it is compared with runs its own kernels
            program, inputs = _trace(plain, arguments, dynamic=dynamic)
        _refuse_operators(program)
        made = Path(folder) / f"model{target.suffix if target.suffix in SUFFIXES else '.pt2'}"
        shapes = _shapes(program, inputs)
        run = (
            _write_aoti(program, made, inputs, outputs, shapes, device)
            if kind == "aoti"
            else _write_onnx(program, made, inputs, outputs)
        )
        try:
            sizes = {str(v.shape[0]) for _, v in _inputs_of(program) if v.dim() and _is_free(v.shape[0])}
            found = compare(run, inner, arguments, inputs, expected, dynamic=len(sizes) == 1, tolerance=tolerance)
        finally:
            if isinstance(run, Tried):
                run.close()
        write_atomically(target, made.read_bytes())
    return Exported(
        target, kind, shapes, outputs, written, found.difference, found.rows, name_left_out(result), found.moved
    )


def _find_format(path: Path, asked: str | None) -> Format:
    if asked is None:
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{path}: expected a name ending in {' or '.join(SUFFIXES)}")
        return SUFFIXES[path.suffix]
    if asked not in get_args(Format):
        raise ValueError(f"format={asked!r}: expected 'aoti' or 'onnx'")
    wanted = next(suffix for suffix, kind in SUFFIXES.items() if kind == asked)
    if path.suffix != wanted:
        raise ValueError(f"{path}: a file of format {asked} is named *{wanted}")
    return asked  # type: ignore[return-value]


def _check_model(model: nn.Module) -> None:
    if training := [name or type(model).__name__ for name, module in model.named_modules() if module.training]:
        raise ValueError(
            f"{name_some(training, 3)} {'is' if len(training) == 1 else 'are'} in training mode; expected a frozen model; hint: loka.convert(model, plan, "
            "freeze=True), or model.eval()"
        )
    if scripted := [name or "the model" for name, module in model.named_modules() if is_scripted(module)]:
        raise ValueError(
            f"{scripted[0]} is run by TorchScript, which torch.export cannot trace; hint: export the module it was "
            "scripted from"
        )


def _check_results(expected: Sequence[Tensor], again: Sequence[Tensor], tolerance: float) -> None:
    """Raise if the results of a model on the example are nothing that a file can be compared with."""
    if not expected:
        raise ValueError("the model returns no tensor")
    if any(bool(widest(t).isnan().any()) for t in expected):
        raise ValueError("the model returns NaN for the example, so the file could not be compared with it")
    if not differ(again, expected) <= tolerance:
        raise ValueError(
            "the model returns other results if it is called with the same example again: it draws random numbers or "
            "keeps state, which a file does not do alike"
        )


def _require_onnx() -> None:
    for module in ("onnx", "onnxscript", "onnxruntime"):
        try:
            __import__(module)
        except ImportError as error:
            raise ValueError(f"format='onnx' needs {module} ({error}); install: pip install 'loka[onnx]'") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings and logs of torch's exporters."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _trace(model: nn.Module, arguments: Arguments, *, dynamic: bool) -> tuple[Any, list[str]]:
    """Return the exported program and the names of its inputs, without those that the model does not read."""
    names = list(arguments.tensors)
    program = _export(model, arguments, names, dynamic=dynamic)
    reads = _reads(program)
    read = [name for name, used in zip(names, reads, strict=True) if used] or names[:1]
    unread = [name for name in names if name not in read and not can_be_made(name, arguments.tensors, read)]
    inputs = [name for name in names if name in read or name in unread]
    if inputs != names:
        program = _export(model, arguments, inputs, dynamic=dynamic)
    return program, inputs


def _export(model: nn.Module, arguments: Arguments, inputs: Sequence[str], *, dynamic: bool) -> Any:
    tensors = tuple(arguments.tensors[name] for name in inputs)
    rows = [t.shape[0] for t in tensors if t.dim()]
    if dynamic and 1 in rows:
        small = [name for name in inputs if arguments.tensors[name].dim() and arguments.tensors[name].shape[0] == 1]
        raise ValueError(
            f"{', '.join(small)} has one row in the example, which tracing specializes on; hint: "
            "an example of two rows or more, or dynamic=False (--fixed)"
        )
    free = tuple({0: torch.export.Dim.AUTO} if t.dim() and dynamic else None for t in tensors)
    flat = Flat(model, arguments, inputs).eval()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # torch prints the whole graph there before it raises
            program = torch.export.export(flat, tensors, dynamic_shapes=(free,), strict=False)
    except ValueError:
        raise
    except GuardOnDataDependentSymNode as error:
        raise ValueError(
            "a branch or a size in this model depends on values of its inputs, and a file has one path: "
            f"{_find_line(error)}"
        ) from error
    except Exception as error:
        raise ValueError(f"torch.export cannot trace this model: {_first_line(error)}") from error
    if dynamic and not any(_is_free(size) for _, v in _inputs_of(program) for size in v.shape):
        raise ValueError(
            f"the model fixes the number of rows to the example's {rows[0]} (its code, or another size of its inputs, "
            "depends on that number); hint: dynamic=False (--fixed)"
        )
    if dynamic:
        _refuse_bounds(program, inputs)
    return program


def _refuse_bounds(program: Any, inputs: Sequence[str]) -> None:
    """Reject a model that branches on its number of rows.

    It was traced for the branch of the example, and a package does not check it: in the other branch it would be wrong.
    """
    asked, on_gpu = [], False
    for name, (_, value) in zip(inputs, _inputs_of(program), strict=True):
        on_gpu |= value.device.type == "cuda"
        size: Any = value.shape[0] if value.dim() else 0
        for symbol in size.node.expr.free_symbols if _is_free(size) else ():
            rows = program.range_constraints.get(symbol)
            if rows is not None and (rows.upper < _MANY or rows.lower > 2):
                asked.append(f"rows of {name} {f'>= {rows.lower}' if rows.upper >= _MANY else f'from {rows.lower} to {rows.upper}'}")  # fmt: skip
    if not asked and not on_gpu:  # on a GPU our own GEMMs check whether rows are a multiple of their granularity
        guards = [guard for guard in getattr(program, "_guards_code", ()) if "==" not in guard or "%" in guard]
        asked = [
            re.sub(r"L\['tensors'\]\[(\d+)\]\.size\(\)\[0\]", lambda found: f"rows of {inputs[int(found[1])]}", guard)
            for guard in guards
        ]
    if asked:
        raise ValueError(
            f"the model branches on its number of rows and was traced for {'; '.join(asked)}: a package would take "
            "that branch for any number; hint: dynamic=False (--fixed), or a forward that does not branch"
        )


def _is_free(size: Any) -> bool:
    """Return True if a size is a symbol that tracing did not specialize."""
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def _find_line(error: Exception) -> str:
    """Return the line of code that torch.export blames, or the first line of its message."""
    _, _, blamed = str(error).partition("The following call raised this error:")
    lines = [line.strip() for line in blamed.splitlines() if line.strip()]
    return ": ".join(lines[:2]) or _first_line(error)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


def _inputs_of(program: Any) -> Iterator[tuple[str, Tensor]]:
    """Return name and example value of the graph's user inputs, in order."""
    wanted = list(program.graph_signature.user_inputs)
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return ((name, nodes[name].meta["val"]) for name in wanted)


def _reads(program: Any) -> list[bool]:
    """Return for every input whether the result depends on its values; checks of sizes or values do not count."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    result = next(node for node in program.graph.nodes if node.op == "output")
    needed, waiting = set(), list(result.all_input_nodes)
    while waiting:
        node = waiting.pop()
        # a size can be taken from any other input with as many rows
        if node not in needed and node.target is not torch.ops.aten.sym_size.int:
            needed.add(node)
            waiting += node.all_input_nodes
    return [nodes[name] in needed for name in program.graph_signature.user_inputs]


def _shapes(program: Any, inputs: Sequence[str]) -> dict[str, str]:
    """Return dtype and shape of every input as text. Dynamic sizes are named `rows`, then `n1`, `n2`, ..."""
    names: dict[str, str] = {}

    def spell(size: Any) -> str:
        text = str(size)
        for symbol in re.findall(r"[su]\d+", text) if _is_free(size) else ():
            names.setdefault(symbol, f"n{len(names)}" if names else "rows")
            text = re.sub(rf"\b{symbol}\b", names[symbol], text)
        return text

    values = [value for _, value in _inputs_of(program)]
    return {
        name: f"{str(v.dtype).removeprefix('torch.')}[{', '.join(map(spell, v.shape))}]"
        for name, v in zip(inputs, values, strict=True)
    }


def _refuse_operators(program: Any) -> None:
    """Reject ops that are registered in Python, which are missing where the file runs."""
    problems: dict[str, None] = {}
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        space = getattr(node.target, "namespace", None) if node.op == "call_function" else None
        if space is not None and space not in _EVERYWHERE:
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            where = stack[-1][0].removeprefix("model.") if stack else "the model"
            kind = getattr(stack[-1][1], "__name__", stack[-1][1]) if stack else ""
            problems[
                (
                    f"{where} ({str(kind).rpartition('.')[2]}): {node.target} is an op implemented in Python, "
                    "which cannot be packaged"
                )
            ] = None
    if problems:
        raise ValueError("this model cannot be exported:\n  " + "\n  ".join(problems))


def _write_aoti(
    program: Any,
    path: Path,
    inputs: Sequence[str],
    outputs: Sequence[str],
    shapes: Mapping[str, str],
    device: torch.device,
) -> Run:
    settings = {
        "aot_inductor.metadata": {
            "inputs": json.dumps(list(inputs)),
            "outputs": json.dumps(list(outputs)),
            "shapes": json.dumps(dict(shapes)),
        },
        # Round to 16-bit where the model does: Inductor drops such casts inside a fused kernel, and a later cast to FP8
        # may then round the other way.
        "emulate_precision_casts": True,
    }
    try:
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=settings)
    except Exception as error:
        raise ValueError(f"AOTInductor cannot compile this model: {_first_line(error)}") from error
    return Tried(path, device)


def _write_onnx(program: Any, path: Path, inputs: Sequence[str], outputs: Sequence[str]) -> Run:
    for node in list(program.graph.nodes):  # assertions have no ONNX equivalent
        packet = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        if packet in _CHECKS and not node.users:
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    names, results = ([name.replace(".", "_") for name in each] for each in (inputs, outputs))
    try:
        made = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OnnxOps.OPSET,
            input_names=names,
            output_names=results,
            external_data=False,
            verbose=False,
        )
        assert made is not None
        made.save(str(path), external_data=False)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        cause = next((line for line in reversed(lines) if "class" in line or "No ONNX function" in line), lines[0])
        raise ValueError(f"this model cannot be expressed in ONNX: {type(error).__name__}: {cause.strip()}") from error
    return _open_onnx(path)


def _open_onnx(path: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    given = [item.name for item in session.get_inputs()]

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        arrays = [tensor.detach().cpu().contiguous().numpy() for tensor in tensors]
        return [torch.from_numpy(array) for array in session.run(None, dict(zip(given, arrays, strict=True)))]

    return run

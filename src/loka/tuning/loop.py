"""The loop, in one call: look at the model, choose per unit the fastest way that is safe, verify the whole of it, apply it.

    tuned = loka.tune(model, batches, loss)          # looks, chooses, verifies, applies
    print(tuned)                                     # units, ways, the step beside bf16, the loss beside bf16

Nothing is trained: the model's weights, gradients, buffers, modes and the random state are what they were, and so is the optimizer. An exception or Ctrl-C leaves the model as it was; with
`out=` what was measured until then is on disk, and the same call goes on from there. The result is never slower than 16 bits and never outside the margin, as far as it was measured; otherwise
nothing is converted, and the record says why.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from loka import mods as mods_room
from loka.dispatch.margin import MARGIN
from loka.lowp.chain import chains_of
from loka.lowp.linear import linears_of
from loka.nn.wrapping import unwrap
from loka.placing import convert
from loka.report.render import require_charts
from loka.tuning.call import Call
from loka.tuning.estimating import Estimator
from loka.tuning.evidence import Evidence
from loka.tuning.progress import Progress, Told
from loka.tuning.session import Session
from loka.tuning.task import MakeOptimizer, Step, Task, check_arity
from loka.tuning.tuned import Tuned
from loka.units.undisturbed import gradients_aside, put_back

Target = Literal["train", "serve"]


def tune(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[..., Tensor] | None = None,
    *,
    step: Step | None = None,
    metric: Callable[[nn.Module, Any], Tensor | float] | None = None,
    margin: float = MARGIN,
    architecture: bool = False,
    target: Target = "train",
    seconds: float = 180.0,
    autocast: torch.dtype | Literal["auto"] | None = "auto",
    thorough: bool = False,
    cuda_graph: bool = True,
    train: int = 0,
    optimizer: MakeOptimizer | None = None,
    tables: bool = False,
    collectives: bool = False,
    estimate_for: str | None = None,
    row_factor: float = 1.0,
    out: str | Path | None = None,
    progress: bool | Told | None = None,
) -> Tuned:
    """Make a model faster in FP8, with proof, in place.

    Args:
        model: any nn.Module, trained for a while: what is safe for a model that has learned nothing says little.
        batches: (inputs, target) pairs for a `loss`, anything for a `step`; half of them choose, the others verify. At most 64 are kept.
        loss: loss(output, target); with one number per example (reduction="none") far fewer batches decide.
        step: step(model, batch) -> loss, instead of a loss; it neither calls backward nor trains.
        metric: metric(model, batch) -> a number or a tensor of them, lower is better, instead of the loss, for verifying; of an AUC give 1 - AUC.
        margin: relative change of the metric that counts as none; 0.0002 is what the field calls significant.
        architecture: also apply no_bias, block_norm and hard_swish first: another architecture, which must be trained. The metric is then compared with the modded model's own.
        target: "train" times forward and backward; "serve" calibrates, times forward and freezes.
        seconds: budget for timing; what would exceed it is not timed, and the record says so. Looking and verifying the metric take what they take.
        autocast: computing type; "auto" is bfloat16 on a GPU for models in float32.
        thorough: also compile with max-autotune and with coordinate descent, on both sides; a note says how to compile what was fastest.
        cuda_graph: whether your step will run in a CUDA graph: captured, or compiled with mode="reduce-overhead". False for one that is launched kernel by kernel: it takes as long as the host takes to
            launch it, where that is longer, and FP8 has more to launch; then what is faster only in a graph is not converted.
        train: steps of a paired run: two copies of the model train on the batches that choose, one by the plan, and are compared on the held-out ones. It is what shows what FP8 gradients do;
            the model itself is not trained. 0: gradients are judged by the score, and by a backward pass beside 16 bits and the reference.
        optimizer: with `train`, optimizer(parameters); None is AdamW at 1e-3.
        tables: also choose the rows of every embedding table: the fewest bytes within the margin. Such rows are rounded for good: reverting gives them back as they are then.
        collectives: also choose codecs for the weights and gradients that ranks would send each other.
        estimate_for: a device that is not here ("NVIDIA H200"): units are taken by the speed they are estimated to have there, labelled so; nothing is timed.
        row_factor: with `estimate_for`, rows of a call there over those here.
        out: folder for evidence, plan, conversion, record and report; the same call goes on from what is there.
        progress: a bar on stderr; None shows one in a terminal; a function(phase, done, total) is told instead.

    Returns:
        The model, converted, with the record of everything measured.

    Raises:
        ValueError: what was given cannot be run; the message says what was seen and what was expected.

    Example:
        >>> tuned = loka.tune(model, batches, torch.nn.functional.binary_cross_entropy_with_logits)
        >>> tuned.plan.save("plan.json")
    """
    if target not in ("train", "serve"):
        raise ValueError(f"target={target!r}: expected 'train' or 'serve'")
    if not isinstance(margin, int | float) or not 0 < margin < 1:
        raise ValueError(f"margin={margin!r}: expected a relative change, e.g. 0.0002 for 0.02 %")
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(f"seconds={seconds!r}: expected a budget above 0; hint: 60 for a small model")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {type(model).__name__}, expected an nn.Module")
    if metric is not None:
        check_arity("metric", metric, 2, "(model, batch)")
    if out is not None:
        require_charts()
    inner = unwrap(model)
    _check_model(inner)
    task = Task(inner, batches, loss, step, _computing_type(inner, autocast))
    training, estimator = target == "train", _estimator_for(estimate_for, row_factor, task.device)
    _check_training(inner, train, target, optimizer)
    present = _mods_of(inner, architecture)
    call = Call(
        task, metric, margin, training, seconds, thorough,
        evidence=Evidence(out, inner, {"training": training, "margin": margin, "thorough": thorough, "autocast": str(task.autocast)}),
        progress=Progress(progress), estimator=estimator, row_factor=row_factor, train=train, optimizer=optimizer,
        choose_tables=tables, choose_collectives=collectives, cuda_graph=cuda_graph,
    )  # fmt: skip
    # captured, and timed, is what runs on the current GPU
    with gradients_aside(inner), torch.cuda.device(task.device) if task.device.type == "cuda" else nullcontext():
        session = Session(call)
        with put_back(inner), ExitStack() as undo:  # steps that are timed run the model, and replay what it writes to
            session.time_original()
            if present:  # the user's own, trained with them: they stay, and none are put on top
                names = present
            else:
                undo.callback(mods_room.revert, inner)
                names = session.apply_mods(list(mods_room.CORE) if architecture else [])
            made = session.run(names, may_leave_mods=not present and not architecture)
            record = msgspec.structs.replace(made, metric_name=_name_metric(metric))
        # the plan applies mods again, so that what is loaded elsewhere is what was measured
        if record.plan.units or record.plan.mods or record.plan.tables or record.plan.collectives or any(site.low_precision_share for site in record.plan.sites):  # fmt: skip
            done = convert(
                inner,
                record.plan,
                freeze=target == "serve",
                example=task.example() or partial(task.losses, inner, task.kept[0]),
            )
            record = msgspec.structs.replace(record, conversion=done)
        tuned = Tuned(model, record)
        session.give_back()
    if out is not None:
        tuned.save(out)
    call.progress.finish(record.verdict)
    return tuned


def _name_metric(metric: Any) -> str:
    """What a verdict calls what was verified."""
    name = "loss" if metric is None else getattr(metric, "__name__", "metric")
    return "metric" if name == "<lambda>" else name


def _check_model(model: nn.Module) -> None:
    """Refuse what is converted already and what has no weights yet."""
    converted = [*(name for name, _ in linears_of(model)), *(name for name, _ in chains_of(model))]
    if converted:
        raise ValueError(f"already converted: {', '.join(converted[:5])}; call loka.revert(model) first")
    lazy = [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise ValueError(f"{', '.join(lazy[:5])} have no shape yet; hint: run the model on one batch, and train it, before it is tuned")  # fmt: skip
    if unused := [name for name, p in model.named_parameters() if p.is_inference()]:
        raise ValueError(f"{', '.join(unused[:5])}: made under torch.inference_mode, which no gradient can pass; hint: make the model outside of it, then load_state_dict")  # fmt: skip
    if empty := [name for name, p in model.named_parameters() if p.is_meta]:
        raise ValueError(f"{', '.join(empty[:5])}: on the meta device, without values; hint: model.to_empty(device=...) and load_state_dict first")  # fmt: skip


def _mods_of(model: nn.Module, architecture: bool) -> list[str]:
    """The mods a model has already; with them the architecture is what was trained, and is not changed again."""
    present = list(mods_room.applied_to(model))
    lacking = [name for name in mods_room.CORE if name not in {text.partition("(")[0] for text in present}]
    if present and architecture and lacking:
        raise ValueError(f"architecture=True applies {', '.join(mods_room.CORE)}, and the model has {', '.join(present)} already; hint: leave architecture out, or loka.mods.revert(model) first")  # fmt: skip
    return present


def _check_training(model: nn.Module, steps: Any, target: str, optimizer: Any) -> None:
    if optimizer is not None and not callable(optimizer):
        raise ValueError(f"optimizer is {type(optimizer).__name__}, expected a function that makes one; hint: optimizer=lambda parameters: torch.optim.{type(optimizer).__name__}(parameters, lr=...)")  # fmt: skip
    if (
        not isinstance(steps, int)
        or steps < 0
        or (steps and target != "train")
        or (optimizer is not None and not steps)
    ):
        raise ValueError(f"train={steps!r}: expected a number of steps, with target='train'; optimizer= belongs to it")
    sparse = [name for name, module in model.named_modules() if getattr(module, "sparse", False)]
    if steps and optimizer is None and sparse:
        raise ValueError(f"train={steps}: {', '.join(sparse[:5])} has sparse gradients, which AdamW does not take; hint: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=...)")  # fmt: skip


def _estimator_for(target: str | None, row_factor: float, device: torch.device) -> Estimator | None:
    """What estimates speeds elsewhere; None where nobody asked, or where the asked device is this one and is measured."""
    if row_factor <= 0 or (row_factor != 1.0 and target is None):
        raise ValueError(f"row_factor={row_factor:g}: expected a positive number, beside estimate_for='NVIDIA H200'")
    if target is None:
        return None
    if device.type == "cuda":
        here = torch.cuda.get_device_name(device)
        if here == target and row_factor == 1.0:
            return None
        raise ValueError(f"estimate_for={target!r}: the model is on {here}, where speeds are measured; hint: leave it out, or move the model to the CPU to plan for another device")  # fmt: skip
    return Estimator(target)


def _computing_type(model: nn.Module, autocast: Any) -> torch.dtype | None:
    if autocast not in ("auto", None, torch.bfloat16, torch.float16):
        raise ValueError(f"autocast={autocast!r}: expected torch.bfloat16, torch.float16, None or 'auto'")
    if autocast != "auto":
        return autocast  # type: ignore[no-any-return]
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    wide = first is not None and first.dtype == torch.float32 and first.device.type == "cuda"
    return torch.bfloat16 if wide else None

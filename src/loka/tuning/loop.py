"""`loka.tune`: observe a model, choose the fastest safe way for every unit, verify the result, apply it.

    tuned = loka.tune(model, batches, loss)
    print(tuned)                                     # every unit and its way, speed and loss compared with bf16

Nothing is trained. Weights, gradients, buffers, train/eval modes, the random state and the optimizer are left as they
were. An exception or Ctrl-C leaves the model unchanged; with `out=`, the measurements so far are on disk and the same
call resumes from them. As far as it was measured, the result is never slower than the 16-bit model and never outside
the margin. If no such conversion is found, nothing is converted and the record says why.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from loka import mods as mods_room
from loka.data.progress import Progress as Told
from loka.dispatch.margin import MARGIN
from loka.lowp.chain import chains_of
from loka.lowp.linear import linears_of
from loka.nn.wrapping import unwrap
from loka.placing import convert
from loka.probe.chains import find_collective
from loka.probe.weights import is_sharded
from loka.records.prose import name_some
from loka.records.tuning import Tuning
from loka.report.render import require_charts
from loka.tuning.call import Call
from loka.tuning.estimating import Estimator
from loka.tuning.evidence import Evidence
from loka.tuning.progress import Progress
from loka.tuning.session import Session
from loka.tuning.task import MakeOptimizer, Step, Task, check_arity
from loka.tuning.tuned import Tuned, keep_earlier
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
    """Make a model faster with FP8, in place, and measure that its quality holds.

    Args:
        model: any nn.Module. Train it for a while first: results for an untrained model mean little.
        batches: (inputs, target) pairs for `loss`, anything for `step`. At most 64 are kept, up to where they start
            over. Choices are made on the first half and verified on the second, the held-out batches.
        loss: loss(output, target). One value per example (reduction="none") needs far fewer batches than a mean.
        step: step(model, batch) -> loss, instead of `loss`. It must not call backward or an optimizer.
        metric: metric(model, batch) -> a number or a tensor of numbers, lower is better; verified instead of the loss.
            For AUC return 1 - AUC.
        margin: relative change of the metric that is acceptable. The default is 0.0002 (0.02 %), a change that counts
            as significant in the field.
        architecture: also apply the mods no_bias, block_norm and hard_swish first. They change the architecture, so the
            model must be trained afterwards. The baseline of the metric is then the modified model in high precision.
        target: "train" times forward and backward; "serve" calibrates, times forward and freezes.
        seconds: budget for timing. What would exceed it is not timed, and the record says so. The budget does not
            cover observing the model and verifying the metric.
        autocast: autocast dtype. "auto" means bfloat16 for float32 models on a GPU, otherwise none.
        thorough: also compile with max-autotune and with coordinate descent, both FP8 and the baseline. A note says how
            to compile the fastest.
        cuda_graph: whether your step will run in a CUDA graph, captured or compiled with mode="reduce-overhead". With
            False, a step takes at least as long as the host needs to launch its kernels. FP8 launches more of them, so
            units that are faster only in a graph are not converted.
        train: number of steps of a paired training run, the only direct test of FP8 gradients. Two copies of the model,
            one converted, train on the first half of the batches and are compared on the held-out ones. With 0,
            gradients are judged by the score and by a backward pass compared with 16-bit and with reference kernels.
        optimizer: for `train`: a function that makes an optimizer from parameters. None means AdamW at 1e-3.
        tables: also choose a format for every embedding table, the smallest within the margin. This rounds the rows
            permanently: reverting changes their format back, but does not restore the lost bits.
        collectives: also choose codecs for the weights and gradients that ranks would exchange.
        estimate_for: a device that is not present ("NVIDIA H200"). Units are chosen by their estimated speed there, and
            labelled as estimates. Nothing is timed, so `thorough` and `cuda_graph=False` do not go with it.
        row_factor: for `estimate_for`: rows per call on that device, relative to the batches given here.
        out: folder for evidence, plan, conversion, record and report. The same call resumes from it; the result of
            another call is moved to a folder `earlier-1` in it, and a note says so.
        progress: show a progress bar on stderr; None shows it only in a terminal. A function(phase, done, total)
            is called instead of showing a bar.

    Returns:
        The converted model, with the record of everything measured.

    Raises:
        ValueError: an argument cannot be used; the message says what was seen and what was expected.

    Example:
        >>> tuned = loka.tune(model, batches, torch.nn.BCEWithLogitsLoss(reduction="none"))
        >>> print(tuned)
        >>> tuned.plan.save("plan.json")
    """
    _check_settings(model, target, margin, seconds, metric, progress)
    if out is not None:
        require_charts()
    inner = unwrap(model)
    _check_model(inner)
    task = Task(inner, batches, loss, step, _resolve_autocast(inner, autocast))
    estimator = _make_estimator(estimate_for, row_factor, task.device)
    if estimator is not None and (thorough or not cuda_graph):
        raise ValueError(
            f"thorough={thorough}, cuda_graph={cuda_graph} with estimate_for={estimate_for!r}: estimates are of steps "
            "in CUDA graphs, compiled in the default mode; hint: leave these out"
        )
    _check_training(inner, train, target, optimizer)
    present = _find_mods(inner, architecture)
    asked = {
        "target": target, "metric": _name_metric(metric), "margin": margin, "architecture": architecture,
        "seconds": seconds, "autocast": task.autocast, "thorough": thorough, "cuda_graph": cuda_graph, "train": train,
        "optimizer": optimizer is not None, "tables": tables, "collectives": collectives, "estimate_for": estimate_for,
        "row_factor": row_factor,
    }  # fmt: skip
    settings = {
        "training": target == "train",
        "margin": margin,
        "thorough": thorough,
        "autocast": str(task.autocast),
    }
    call = Call(
        task,
        metric=metric,
        margin=margin,
        training=target == "train",
        budget=seconds,
        thorough=thorough,
        evidence=Evidence(out, inner, settings),
        progress=Progress(progress),
        estimator=estimator,
        row_factor=row_factor,
        train=train,
        optimizer=optimizer,
        choose_tables=tables,
        choose_collectives=collectives,
        cuda_graph=cuda_graph,
        arguments={name: str(value) for name, value in asked.items()},
    )
    record = _tune(call, inner, present, architecture)
    if out is not None and (kept := keep_earlier(Path(out), record)) is not None:
        note = f"the result of a call with other arguments, model or data was moved from {out} to {kept}"
        record = msgspec.structs.replace(record, notes=[*record.notes, note])
    tuned = Tuned(model, record)
    if out is not None:
        try:
            tuned.save(out)
        except BaseException:  # a full disk, Ctrl-C: whoever gets no result gets the model back
            tuned.revert()
            raise
    call.progress.finish(tuned.record.verdict)
    return tuned


def _tune(call: Call, model: nn.Module, present: list[str], architecture: bool) -> Tuning:
    """Run the phases of a call and convert the model by the plan they arrive at. `present` are mods it already has."""
    task = call.task
    # steps are captured and timed on the current GPU, so it must be the model's
    with gradients_aside(model), torch.cuda.device(task.device) if task.device.type == "cuda" else nullcontext():
        session = Session(call)
        with put_back(model), ExitStack() as undo:  # timed steps write to the model's buffers
            session.time_original()
            names = present
            if not present:  # otherwise the model was trained with its mods: keep them, and apply no others
                undo.callback(mods_room.revert, model)
                names = session.apply_mods(list(mods_room.CORE) if architecture else [])
            record = session.run(names, may_drop_mods=not present and not architecture)
        record = msgspec.structs.replace(record, metric_name=_name_metric(call.metric))
        # convert applies the mods of the plan itself, as it does when the plan is loaded elsewhere
        if not record.plan.changes_nothing:
            example = task.example() or partial(task.losses, model, task.kept[0])
            done = convert(model, record.plan, freeze=not call.training, example=example)
            record = msgspec.structs.replace(record, conversion=done)
        session.give_back()
    return record


def _check_settings(model: Any, target: Any, margin: Any, seconds: Any, metric: Any, progress: Any) -> None:
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
    if not isinstance(progress, bool | None):
        check_arity("progress", progress, 3, "(phase, done, total)")


def _name_metric(metric: Any) -> str:
    """Return the name of the metric that the verdict uses."""
    name = "loss" if metric is None else getattr(metric, "__name__", "metric")
    return "metric" if name == "<lambda>" else name


def _check_model(model: nn.Module) -> None:
    """Raise if a model is already converted, or has weights without shape, values or gradients, or only a part of them."""
    converted = [*(name for name, _ in linears_of(model)), *(name for name, _ in chains_of(model))]
    if converted:
        raise ValueError(f"already converted: {name_some(converted)}; call loka.revert(model) first")
    if isinstance(model, torch.jit._script.RecursiveScriptModule):
        raise ValueError(
            "the model is run by TorchScript, so none of its linears can be replaced; hint: tune the module that it "
            "was scripted from"
        )
    lazy = [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise ValueError(
            f"{name_some(lazy)} have no shape yet; hint: run the model on one batch and train it before tuning it"
        )
    if unused := [name for name, p in model.named_parameters() if p.is_inference()]:
        raise ValueError(
            f"{name_some(unused)}: made under torch.inference_mode, so they cannot have gradients; hint: "
            "make the model outside of it, then load_state_dict"
        )
    if sharded := [name for name, p in model.named_parameters() if is_sharded(p)]:
        raise ValueError(
            f"{name_some(sharded)}: sharded over ranks, so this rank cannot measure them; hint: "
            "tune the model before fully_shard, then loka.convert(model, plan) on every rank"
        )
    if (why := find_collective(model)) and dist.get_world_size() > 1:
        raise ValueError(
            f"{why}, so running the model is a call of all ranks, and a rank that tunes would wait for the others; "
            "hint: tune the model before it communicates (convert_sync_batchnorm, sharding), or a part that does not"
        )
    if empty := [name for name, p in model.named_parameters() if p.is_meta]:
        raise ValueError(
            f"{name_some(empty)}: on the meta device, without values; hint: model.to_empty(device=...) and "
            "load_state_dict first"
        )


def _find_mods(model: nn.Module, architecture: bool) -> list[str]:
    """Return the mods a model already has. It was trained with them, so its architecture is not changed again."""
    present = list(mods_room.applied_to(model))
    lacking = [name for name in mods_room.CORE if name not in {text.partition("(")[0] for text in present}]
    if present and architecture and lacking:
        raise ValueError(
            f"architecture=True applies {', '.join(mods_room.CORE)}, but the model already has {', '.join(present)}; "
            "hint: leave architecture out, or call loka.mods.revert(model) first"
        )
    return present


def _check_training(model: nn.Module, steps: Any, target: str, optimizer: Any) -> None:
    if optimizer is not None and not callable(optimizer):
        raise ValueError(
            f"optimizer is {type(optimizer).__name__}, expected a function that makes one; hint: "
            f"optimizer=lambda parameters: torch.optim.{type(optimizer).__name__}(parameters, lr=...)"
        )
    if (
        not isinstance(steps, int)
        or steps < 0
        or (steps and target != "train")
        or (optimizer is not None and not steps)
    ):
        raise ValueError(f"train={steps!r}: expected a number of steps, with target='train'; optimizer= needs train=")
    sparse = [name for name, module in model.named_modules() if getattr(module, "sparse", False)]
    if steps and optimizer is None and sparse:
        raise ValueError(
            f"train={steps}: {name_some(sparse)} has sparse gradients, which AdamW does not support; hint: "
            "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=...)"
        )


def _make_estimator(target: str | None, row_factor: float, device: torch.device) -> Estimator | None:
    """Return the estimator for a device, or None if none was requested or the device is this one and is measured."""
    if row_factor <= 0 or (row_factor != 1.0 and target is None):
        raise ValueError(f"row_factor={row_factor:g}: expected a positive number, together with estimate_for='NVIDIA H200'")  # fmt: skip
    if target is None:
        return None
    if device.type == "cuda":
        here = torch.cuda.get_device_name(device)
        if here == target and row_factor == 1.0:
            return None
        raise ValueError(
            f"estimate_for={target!r}: the model is on {here}, where speeds are measured; hint: "
            "leave estimate_for out, or move the model to the CPU to plan for another device"
        )
    return Estimator(target)


def _resolve_autocast(model: nn.Module, autocast: Any) -> torch.dtype | None:
    if autocast not in ("auto", None, torch.bfloat16, torch.float16):
        raise ValueError(f"autocast={autocast!r}: expected torch.bfloat16, torch.float16, None or 'auto'")
    if autocast != "auto":
        return autocast  # type: ignore[no-any-return]
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    wide = first is not None and first.dtype == torch.float32 and first.device.type == "cuda"
    return torch.bfloat16 if wide else None

"""A frozen ranker in a folder: safetensors and JSON, no code.

    ranker.json          how to build the model, and its columns (records.RankerInfo)
    model.safetensors    its state_dict
    plan.json            optional; applied with `loka.convert` after the weights are loaded

A model is one of the built-in families, or is built by a factory `package.module:function`. A folder cannot make a
server import code: a factory runs only if the caller names the same one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from loka.data.batch import Batch, Jagged
from loka.data.schema import Field, Schema, SequenceField
from loka.lowp.chain_modules import chains_of
from loka.lowp.folding import PACKED
from loka.lowp.linear import linears_of
from loka.models import build_ranker
from loka.placing import convert
from loka.records import Plan, RankerColumn, RankerInfo, capture_environment, replacing
from loka.records import load as load_record
from loka.records import save as save_record

EXAMPLE = 64  # rows of the example batch used when a plan is applied
INFO, MODEL, PLAN = "ranker.json", "model.safetensors", "plan.json"


@dataclass(frozen=True)
class RankerBundle:
    """A ranker: a module in eval mode that maps a `loka.data.Batch` to logits [rows, labels], and its columns.

    Args:
        model: the module.
        schema: the columns it reads.
        info: the content of ranker.json.

    Example:
        >>> load_ranker("runs/ranker").schema.labels                                    # doctest: +SKIP
    """

    model: nn.Module
    schema: Schema
    info: RankerInfo


def is_ranker_bundle(folder: str | Path) -> bool:
    """Return True if a folder holds a ranker's bundle."""
    return (Path(folder) / INFO).is_file()


def save_ranker(
    model: nn.Module,
    schema: Schema,
    folder: str | Path,
    *,
    family: str | None = None,
    size: str | None = None,
    options: Mapping[str, str | int | float | bool | None] | None = None,
    factory: str | None = None,
    plan: Plan | None = None,
    name: str | None = None,
    link: Literal["sigmoid", "identity"] = "sigmoid",
) -> None:
    """Write a ranker's bundle: plain weights, and the plan that is applied when it is loaded.

    Args:
        model: the model that `family`, `size` and `options`, or `factory`, build. It may be converted by `plan`.
        schema: its columns.
        folder: folder to write.
        family, size, options: a built-in family, one of its sizes, and its options. Give either `family` or `factory`.
        factory: `package.module:function` that builds the model, called with the schema and `options`.
        plan: precision of its linears.
        name: name of the ranker; default: the folder's.
        link: function that turns logits into scores.

    Raises:
        ValueError: the model runs in low precision but no plan was given, or its plain weights are gone. The loaded
            model would differ from this one.

    Example:
        >>> save_ranker(model, schema, "runs/ranker", family="wukong", size="tiny")     # doctest: +SKIP
    """
    if (family is None) == (factory is None):
        raise ValueError("a ranker bundle names a family of this library or a factory, exactly one of them")
    _check_plain(model, plan)
    target = Path(folder)
    columns = [RankerColumn(name=f.name, cardinality=f.cardinality) for f in schema.categorical]
    columns += [
        RankerColumn(name=s.name, cardinality=s.cardinality, max_length=s.max_length, shares=s.shares)
        for s in schema.sequences
    ]
    info = RankerInfo(
        name=name or target.name,
        family=family,
        size=size or ("tiny" if family else None),
        options=dict(options or {}),
        factory=factory,
        dense=list(schema.dense),
        columns=columns,
        labels=list(schema.labels),
        link=link,
        environment=capture_environment(),
    )
    with replacing(target / MODEL) as written:
        save_file({k: t.detach().cpu().contiguous().clone() for k, t in model.state_dict().items()}, written)
        (target / INFO).unlink(missing_ok=True)  # a folder with this file is complete, also one that is written again
    if plan is None:
        (target / PLAN).unlink(missing_ok=True)  # of an earlier model
    else:
        save_record(plan, target / PLAN)
    save_record(info, target / INFO)


def _check_plain(model: nn.Module, plan: Plan | None) -> None:
    """Raise ValueError if the loaded model would run in another precision than this one."""
    if any(getattr(module, PACKED, False) for module in model.modules()):
        raise ValueError(
            "this model keeps FP8 weights only (loka.quantize), but a ranker's folder holds plain ones; hint: "
            "save the model before it is quantized, with plan="
        )
    low = [name for name, _ in (*linears_of(model), *chains_of(model))]
    if low and plan is None:
        raise ValueError(
            f"{', '.join(low[:3])}{' and others' if len(low) > 3 else ''} run in low precision here, "
            "but would not after the folder is loaded; hint: give the plan= that converted the model, "
            "or loka.revert(model) to serve the original"
        )


def load_ranker(folder: str | Path, *, factory: str | None = None, device: torch.device | str = "cpu") -> RankerBundle:
    """Load a ranker's bundle.

    Args:
        folder: folder written by `save_ranker`.
        factory: `package.module:function` that the caller allows to run; must be the one the bundle names. It is called
            with the schema and the bundle's options.
        device: device to move the model to before the plan is applied.

    Returns:
        The model, converted by the plan if there is one.

    Example:
        >>> load_ranker("runs/ranker", device="cuda").model                             # doctest: +SKIP
    """
    source = Path(folder)
    if not is_ranker_bundle(source):
        raise ValueError(f"{source} holds no {INFO}; hint: loka.serving.save_ranker(model, schema, folder, family=...)")
    info = load_record(source / INFO, RankerInfo)
    schema = read_schema(info)
    model = _build(info, schema, factory)
    try:
        model.load_state_dict(load_file(source / MODEL))
    except (RuntimeError, SafetensorError, OSError) as error:
        raise ValueError(f"{source / MODEL}: does not fit the model that {INFO} describes: {error}") from error
    model = model.to(device).eval().requires_grad_(False)
    if (source / PLAN).is_file():  # a plan's rewrites, and chains that share an input, are found by running the model
        convert(model, load_record(source / PLAN, Plan), freeze=True, example=draw_batch(schema, EXAMPLE, device))
    return RankerBundle(model, schema, info)


def draw_batch(schema: Schema, rows: int, device: torch.device | str = "cpu") -> Batch:
    """Draw a batch of random features, always the same for a schema, to run a model without data. Labels are zero."""
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(f.cardinality, (rows,), generator=g) for f in schema.categorical]
    histories = {
        s.name: [torch.randint(s.cardinality, (int(n),), generator=g).tolist() for n in torch.randint(s.max_length + 1, (rows,), generator=g)]
        for s in schema.sequences
    }  # fmt: skip
    return Batch(
        torch.randn(rows, len(schema.dense), generator=g),
        torch.stack(ids, 1) if ids else torch.zeros(rows, 0, dtype=torch.int64),
        {name: Jagged.from_rows(values) for name, values in histories.items()},
        torch.zeros(rows, len(schema.labels)),
        torch.zeros(rows, dtype=torch.int64),
    ).to(device)


def read_schema(info: RankerInfo) -> Schema:
    """Return the columns of a bundle as a schema."""
    return Schema(
        dense=tuple(info.dense),
        categorical=tuple(Field(c.name, c.cardinality) for c in info.columns if c.max_length is None),
        sequences=tuple(
            SequenceField(c.name, c.cardinality, c.max_length, c.shares)
            for c in info.columns
            if c.max_length is not None
        ),
        labels=tuple(info.labels),
    )


def _build(info: RankerInfo, schema: Schema, allowed: str | None) -> nn.Module:
    if info.factory is not None:
        if allowed != info.factory:
            raise ValueError(
                f"the bundle names the factory {info.factory!r}, which was not allowed to run; hint: --factory {info.factory}"
            )
        return _find(info.factory)(schema, **info.options)
    if allowed is not None:
        raise ValueError(f"the bundle is a {info.family}, made without a factory, but {allowed!r} was named")
    assert info.family is not None  # a bundle names a family or a factory
    options: dict[str, Any] = dict(info.options)
    return build_ranker(schema, info.family, info.size or "tiny", **options)


def _find(name: str) -> Callable[..., nn.Module]:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"factory {name!r}: expected package.module:function")
    found: Any = getattr(import_module(module), attribute)
    return found  # type: ignore[no-any-return]

"""Build models by family and size.

    build("wukong", "tiny")                                   a core of a named size
    build("wukong", "8x96x3x8192", n=256, norm="block")       with overrides of the config or its style
    build(config)                                             from your own config
    build_ranker(schema, "wukong", "tiny")                    embedding tables for a schema and a core that fits it

A family is one row of `FAMILIES`: config class, model class, sizes. Adding a model is one file and one row.
"""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from loka.models import dcn, dhen, dlrm, elfm, hstu, interformer, onerec, wukong
from loka.models.ranker import Core, Ranker, count_vectors
from loka.nn import Style
from loka.records.options import check_options

if TYPE_CHECKING:
    from loka.data.schema import Schema


@dataclass(frozen=True)
class Family:
    """One paper: its config class, its model class, and its named sizes."""

    config: type
    model: type[nn.Module]
    sizes: dict[str, Any]


FAMILIES = {
    "dcn": Family(dcn.DCNv2Config, dcn.DCNv2, dcn.SIZES),
    "dhen": Family(dhen.DHENConfig, dhen.DHEN, dhen.SIZES),
    "dlrm": Family(dlrm.DLRMConfig, dlrm.DLRM, dlrm.SIZES),
    "elfm": Family(elfm.ELFMConfig, elfm.ELFM, elfm.SIZES),
    "hstu": Family(hstu.HSTUConfig, hstu.HSTU, hstu.SIZES),
    "interformer": Family(interformer.InterFormerConfig, interformer.InterFormer, interformer.SIZES),
    "onerec": Family(onerec.OneRecConfig, onerec.OneRec, onerec.SIZES),
    "wukong": Family(wukong.WukongConfig, wukong.Wukong, wukong.SIZES),
}


def names() -> tuple[str, ...]:
    """Return the names of all families.

    Returns:
        Names for `build`.

    Example:
        >>> "wukong" in names()
        True
    """
    return tuple(FAMILIES)


def sizes(family: str) -> tuple[str, ...]:
    """Return the names of a family's sizes.

    Args:
        family: a name.

    Returns:
        Smallest first.

    Example:
        >>> sizes("wukong")[0]
        'tiny'
    """
    return tuple(_family(family).sizes)


def configure(family: str, size: str = "tiny", **overrides: Any) -> Any:
    """Return the config of a named size, with fields replaced.

    Args:
        family: its name.
        size: name of a size.
        overrides: fields of the config, or of its style (`norm`, `activation`, `bias`, ...).

    Returns:
        A frozen config.

    Example:
        >>> configure("wukong", "tiny", n=26)
    """
    known = _family(family)
    if size not in known.sizes:
        raise ValueError(f"{family} has no size {size!r}; its sizes are {', '.join(known.sizes)}")
    config = known.sizes[size]
    own = {f.name for f in fields(known.config)}
    shared = {f.name for f in fields(Style)} - own if "style" in own else set()
    for name in overrides:
        if name not in own | shared:
            raise ValueError(f"{family} has no option {name!r}; its options are {', '.join(sorted(own | shared))}")
    style = {k: v for k, v in overrides.items() if k in shared}
    plain = {k: v for k, v in overrides.items() if k in own}
    check_options(Style, style, family)
    check_options(known.config, plain, family)
    if style:
        plain["style"] = replace(plain.get("style", config.style), **style)
    return replace(config, **plain)


def build(family: Any, size: str = "tiny", **overrides: Any) -> nn.Module:
    """Build a model by family and size, or from a config.

    Args:
        family: name of a family, or a config.
        size: name of a size.
        overrides: fields of the config; for a named family also of its style.

    Returns:
        The model, in float32 on the CPU.

    Example:
        >>> build("wukong", "tiny", norm="block")
    """
    config = configure(family, size, **overrides) if isinstance(family, str) else family
    for known in FAMILIES.values():
        if type(config) is known.config:
            return known.model(replace(config, **overrides) if config is family else config)
    raise ValueError(f"no family is configured by {type(config).__name__}; the families are {', '.join(FAMILIES)}")


def build_ranker(
    schema: "Schema",
    family: str,
    size: str = "tiny",
    *,
    dense_vectors: int = 1,
    dense_hidden: tuple[int, ...] = (),
    sparse: bool = False,
    check_on_gpu: bool = False,
    **overrides: Any,
) -> Ranker:
    """Build a Ranker for a schema, from which the core's n and labels follow.

    Args:
        schema: of a data set.
        family: of the core.
        size: name of a size.
        dense_vectors: number of vectors that the dense features are mapped to.
        dense_hidden: hidden widths of that MLP.
        sparse: whether gradients of tables are sparse tensors.
        check_on_gpu: check ids on a GPU too, which synchronizes with it.
        overrides: fields of the core's config.

    Returns:
        A model of embedding tables, dense MLP and core.

    Example:
        >>> build_ranker(data.schema, "dlrm", "small")
    """
    model = _family(family).model
    if not issubclass(model, Core):
        rankers = ", ".join(name for name, f in FAMILIES.items() if issubclass(f.model, Core))
        raise ValueError(
            f"{family} is a sequence model with its own forward, not a ranking core; the cores are {rankers}"
        )
    n = count_vectors(schema, model, dense_vectors=dense_vectors)
    fitted = {"n": n, "labels": len(schema.labels), **model.fit(schema, dense_vectors=dense_vectors)}
    core = build(configure(family, size, **{**fitted, **overrides}))
    assert isinstance(core, Core)
    return Ranker(
        schema, core, dense_vectors=dense_vectors, dense_hidden=dense_hidden, sparse=sparse, check_on_gpu=check_on_gpu
    )


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise ValueError(f"there is no model family {name!r}; the families are {', '.join(FAMILIES)}")
    return FAMILIES[name]

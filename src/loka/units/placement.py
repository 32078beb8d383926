"""Build chains from units and place them in a model, by the names of its modules."""

from typing import cast

from torch import nn

from loka.kernels.activation import ACTIVATIONS
from loka.lowp.chain import Chain, Part
from loka.lowp.chain_function import ChainPrecision, Link
from loka.lowp.interaction import place_interaction, refuse_interaction
from loka.lowp.linear import refuse
from loka.nn.replacing import is_watched, runs_as
from loka.nn.wrapping import named_sites
from loka.records.unit import LinkPlan, Magnitude, ScaleSource, UnitPlan
from loka.units.following import activation_of, norm_eps, norm_kind


def refuse_unit(model: nn.Module, unit: UnitPlan) -> list[str]:
    """Return every reason why a unit does not fit a model.

    Args:
        model: wrapped or not.
        unit: from a plan, or from `discover`.

    Returns:
        One line per problem, with the module's name; empty if the unit can be placed.

    Example:
        >>> refuse_unit(model, discover(another_model, batch).units[0])
        ['over.0: the model has no such module']
    """
    modules = dict(named_sites(model))
    problems = [problem for link in unit.links for problem in _refuse_link(modules, link)]
    if unit.around is not None:
        problems += _refuse_around(modules, unit)
    last = unit.links[-1]
    if last.norm in ("layer", "rms"):
        problems.append(
            f"{last.linear}: the last linear of a unit cannot have a {last.norm} norm, which runs outside of the chain"
        )
    kinds = {id(modules[name]) for name in unit.linears if name in modules}
    if len(kinds) < len([name for name in unit.linears if name in modules]):
        problems.append(f"{unit.name}: two of its linears are one module")
    return problems


def _refuse_link(modules: dict[str, nn.Module], link: LinkPlan) -> list[str]:
    linear = modules.get(link.linear)
    if linear is None:
        return [f"{link.linear}: the model has no such module"]
    if reason := refuse(linear):
        return [f"{link.linear}: {reason}"]
    assert isinstance(linear, nn.Linear)
    problems = []
    if link.activation not in ACTIVATIONS:
        problems.append(f"{link.linear}: activation {link.activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    if (linear.in_features, linear.out_features) != (link.k, link.n):
        seen = f"K {linear.in_features}, N {linear.out_features}"
        problems.append(f"{link.linear}: the model has {seen}, the plan K {link.k}, N {link.n}")
    names = [
        *link.passed,
        *([link.norm_site] if link.norm_site else []),
        *([] if link.dropout_site is None else [link.dropout_site]),
        *link.callers,
    ]
    problems += [f"{name}: the model has no such module" for name in names if name not in modules]
    if is_watched(linear):
        problems.append(f"{link.linear}: has hooks that would see other tensors; hint: remove them first")
    if linear.weight.is_meta:  # scales are made beside the weights, and `to_empty` would not move them
        problems.append(f"{link.linear}: on the meta device, without values; hint: model.to_empty(device=...) first")
    return problems or _refuse_behind(modules, link, linear)


def _refuse_behind(modules: dict[str, nn.Module], link: LinkPlan, linear: nn.Linear) -> list[str]:
    """Return every difference between the modules after the linear and what the plan replaces."""
    problems, found = [], {"norm": "none", "activation": "none"}
    for name in link.passed:
        module = modules[name]
        if is_watched(module):
            problems.append(f"{name}: has hooks that would see other tensors; hint: remove them first")
        if (norm := norm_kind(module, linear.out_features)) is not None:
            found["norm"] = norm
            eps = norm_eps(module)
            if name != link.norm_site or eps != link.eps:
                problems.append(
                    f"{name}: a {norm} norm with eps {eps:g}, the plan has {link.norm_site or 'none'} with eps {link.eps:g}"
                )
        elif (activation := activation_of(module)) is not None:
            found["activation"] = activation
            slope = getattr(module, "negative_slope", link.slope)
            if slope != link.slope:
                problems.append(f"{name}: has slope {slope:g}, the plan {link.slope:g}")
        elif not runs_as(module, nn.Identity, nn.Dropout):
            problems.append(f"{name}: is a {type(module).__name__}, which cannot run in a chain")
    if link.dropout_site is None:
        if link.dropout is not None:
            problems.append(f"{link.linear}: the plan has a dropout after it, but no dropout_site")
    elif not runs_as(modules[link.dropout_site], nn.Dropout) and link.dropout_site not in link.callers:
        kind = type(modules[link.dropout_site]).__name__
        problems.append(f"{link.dropout_site}: is a {kind}, the plan has a dropout there")
    if link.called and found["activation"] == "none":  # a functional activation can only be checked when it runs
        found["activation"] = link.activation
    for what, name in found.items():
        if name != getattr(link, what) and not problems:
            problems.append(f"{link.linear}: the model has {what} {name} after it, the plan {getattr(link, what)}")
    return problems


def _refuse_around(modules: dict[str, nn.Module], unit: UnitPlan) -> list[str]:
    if unit.around not in modules:
        return [f"{unit.around}: the model has no such module"]
    linears = [modules[name] for name in unit.linears if name in modules]
    reason = refuse_interaction(modules[unit.around], linears, bounded_input=unit.bounded_input)
    return [] if reason is None else [f"{unit.around}: its interactions cannot be fused: {reason}"]


def build_chain(model: nn.Module, unit: UnitPlan) -> Chain:
    """Build the chain of a unit without placing it.

    Args:
        model: wrapped or not; it is not changed.
        unit: what to build.

    Returns:
        A chain of the model's own modules. Its first scales come from the unit's magnitudes, if it has any.

    Raises:
        ValueError: the unit does not fit the model; the message has every reason.

    Example:
        >>> chain = build_chain(model, discover(model, batch).units[0])
        >>> chain.place()
    """
    if problems := refuse_unit(model, unit):
        raise ValueError(f"unit {unit.name} does not fit this model:\n  " + "\n  ".join(problems))
    modules = dict(named_sites(model))
    parts = [_part(modules, link) for link in unit.links]
    chosen = {op: name for bucket in unit.kernels[-1:] for op, name in bucket.kernels.items()}
    precision = ChainPrecision(
        gradient=unit.gradient,
        fused_backend=chosen.get("fused_linear", "auto"),
        gemm_backend=chosen.get("scaled_mm", "auto"),
        quantize_backend=chosen.get("quantize", "auto"),
    )
    chain = Chain(unit.name, parts, precision, bounded_input=unit.bounded_input)
    chain.start_from(unit.magnitudes)
    first = unit.magnitudes.get(unit.links[0].linear)
    if unit.scales == "calibrated" and not unit.bounded_input and first is not None and first.input > 0:
        chain.fix_input(first.input)
    return chain


def _part(modules: dict[str, nn.Module], link: LinkPlan) -> Part:
    return Part(
        Link(
            link.linear,
            "none" if link.norm == "batch" else link.norm,
            link.activation,
            link.eps,
            link.slope,
            link.dropout,
        ),
        cast(nn.Linear, modules[link.linear]),
        None if link.norm_site is None else modules[link.norm_site],
        tuple(modules[name] for name in link.passed),
        tuple(modules[name] for name in link.callers),
        link.called,
        None if link.dropout_site is None else modules[link.dropout_site],
    )


def describe_chain(model: nn.Module, chain: Chain) -> UnitPlan:
    """Return the unit from which `build_chain` would build a placed chain.

    Args:
        model: the model that contains the chain.
        chain: a placed chain.

    Returns:
        The unit, with the magnitudes that the chain's scales currently come from.

    Example:
        >>> chain = place(model, discover(model, batch).units[0])
        >>> unit = describe_chain(model, chain)
    """
    names = {id(module): name for name, module in reversed(list(named_sites(model)))}
    links, magnitudes = [], {}
    for part, out, grad in zip(chain.parts, chain.out, chain.grad, strict=True):
        link, linear = part.link, part.linear
        links.append(
            LinkPlan(
                linear=link.linear, k=linear.in_features, n=linear.out_features, norm="batch" if part.folds else link.norm, activation=link.activation, eps=link.eps if part.norm is None else norm_eps(part.norm), slope=link.slope,
                norm_site=None if part.norm is None else names[id(part.norm)], passed=[names[id(module)] for module in part.passed],
                callers=[names[id(module)] for module in part.callers], called=part.called,
                dropout=part.dropout.p if isinstance(part.dropout, nn.Dropout) else link.dropout, dropout_site=None if part.dropout is None else names[id(part.dropout)],
            )
        )  # fmt: skip
        largest = [0.0 if state is None else float(state.largest) for state in (out, grad)]
        magnitudes[link.linear] = Magnitude(output=largest[0], gradient=largest[1])
    free = any(state is not None for state in chain.out)
    scales: ScaleSource = "bounded" if len(links) > 1 else "dynamic"
    return UnitPlan(
        name=chain.name, links=links, scales="delayed" if free else scales, gradient=chain.precision.gradient, bounded_input=chain.bounded_input,
        around=None if chain.around is None else names[id(chain.around)], magnitudes=magnitudes,
    )  # fmt: skip


def place(model: nn.Module, unit: UnitPlan) -> Chain:
    """Build a unit's chain and place it.

    Args:
        model: changed in place; wrapped or not.
        unit: what to place.

    Returns:
        The placed chain.

    Example:
        >>> chain = place(model, discover(model, batch).units[0])
    """
    chain = build_chain(model, unit).place()
    if unit.around is not None:
        try:
            place_interaction(dict(named_sites(model))[unit.around])
        except (KeyError, ValueError):
            chain.release()
            raise
    return chain

"""Chains in `loka plan --chains MODEL`: along a tower (linear -> norm -> activation -> linear ...) the choice is joint.

A report says what every linear is like and not what stands between them, so the model is opened once more, its towers are found (modules whose forward is one
straight line, as `loka.mods.Fuse` finds them), and each is planned by the shortest path over the kernels that were measured on the target
(`loka.dispatch.chain_plan`): which representation travels between two ops, and which kernels fuse. Only Specs that Probe found accurate enough are
allowed. A tower that rows of the target do not lead through gets a note instead, with what was missing.

Chains are of the forward pass, with weights quantised beforehand. They stand beside the choices of the single GEMMs in the plan; `loka.convert` binds those, and
`loka.mods.Fuse(precision="fp8")` is what runs towers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from loka.dispatch import ChainOp, Database, Policy
    from loka.dispatch.chain_plan import Refuse
    from loka.records import ChainPlan, Plan, ProbeReport, Site

__all__ = ["add_chains", "describe", "find_towers"]

ABOUT = (
    "chains are of the forward pass, with weights quantised beforehand; convert binds single GEMMs, "
    "loka.mods.Fuse(precision='fp8') runs towers as chains"
)


def add_chains(plan: Plan, report: ProbeReport, policy: Policy, model: nn.Module, database: Database) -> Plan:
    """The plan with a chain for every tower that the target's rows lead through, and a note for every other."""
    import msgspec

    from loka.dispatch import plan_chain, with_chains
    from loka.dispatch.speed import choose_machine

    assert policy.target is not None  # checked where it is asked for
    machine, _ = choose_machine(database, policy.target, report)
    sites = {site.name: site for site in report.sites}
    chains: list[ChainPlan] = []
    notes = [ABOUT]
    for tower in find_towers(model, sites):
        m = max(1, round(sites[_first_linear(tower)].m * policy.row_factor))
        try:
            chains.append(plan_chain(tower, m, database, machine, refuse=_refuse(plan, report, policy)))
        except ValueError as error:
            notes.append(f"no chain at {m} rows: {str(error).splitlines()[0].rstrip(':')}")
    if len(notes) == 1 and not chains:
        notes.append("no chain: the model has no tower, two or more linears, norms and activations in one straight line, all of them probed")  # fmt: skip
    made = with_chains(plan, chains)
    return msgspec.structs.replace(made, notes=[*made.notes, *notes])


def _refuse(plan: Plan, report: ProbeReport, policy: Policy) -> Refuse:
    """What accuracy, an override or a named recipe forbids a linear."""
    from loka.dispatch import recipe_named, refuse_by_report

    by_report = refuse_by_report(report, policy)
    kept = {s.site for s in plan.sites for c in s.choices if not c.quantized and c.reason.startswith("override ")}
    only = None if policy.recipe == "auto" else recipe_named(policy.recipe).fprop

    def refuse(op: ChainOp, a: str, b: str) -> str | None:
        if op.name in kept:
            return "an override keeps it in high precision"
        if only is not None and (a.removesuffix(":static"), b) != (str(only.a), str(only.b)):
            return f"--recipe {policy.recipe} quantises otherwise"
        return by_report(op, a, b)

    return refuse


def find_towers(model: nn.Module, sites: dict[str, Site]) -> Iterator[list[ChainOp]]:
    """Straight lines of two or more ops with a linear among them; every linear is a site, runs once, and all see the same number of rows."""
    from loka.mods.chain import unroll

    done: list[str] = []
    used: set[str] = set()
    for name, module in model.named_modules():
        if any(outer == "" or name.startswith(f"{outer}.") for outer in done) or next(module.children(), None) is None:
            continue
        atoms = unroll(module)
        if isinstance(atoms, str):
            continue  # a module inside of it may be one
        done.append(name)
        for run in _runs([(f"{name}.{atom}".lstrip("."), module.get_submodule(atom)) for atom in atoms], sites):
            linears = [op.name for op in run if op.kind == "linear"]
            rows = {sites[name].m for name in linears}
            if len(run) > 1 and len(rows) == 1 and len({*linears}) == len(linears) and used.isdisjoint(linears):
                used.update(linears)
                yield run


def _runs(atoms: list[tuple[str, nn.Module]], sites: dict[str, Site]) -> Iterator[list[ChainOp]]:
    """The atoms of a straight line, cut wherever one is no op of a chain."""
    from torch.nn import Identity

    run: list[ChainOp] = []
    for name, atom in atoms:
        if isinstance(atom, Identity):
            continue
        op = _op(name, atom, run[-1].n if run else None, sites)
        if op is None or (run and run[-1].n != op.k):
            yield run
            run = []
        if op is not None:
            run.append(op)
    yield run


def _op(name: str, module: nn.Module, width: int | None, sites: dict[str, Site]) -> ChainOp | None:
    """The op of a chain that a module is, or None. `width`: of what it reads, where that is known."""
    from torch import nn

    from loka.dispatch import ChainOp
    from loka.mods.chain import ACTIVATIONS
    from loka.nn import BLOCK, BlockNorm

    if type(module) is nn.Linear:
        site = sites.get(name)
        probed = site is not None and (site.k, site.n) == (module.in_features, module.out_features)
        return ChainOp(name, "linear", module.in_features, module.out_features) if probed else None
    if type(module) in ACTIVATIONS:
        return None if width is None else ChainOp(name, "activation", width, width, ACTIVATIONS[type(module)])
    if isinstance(module, BlockNorm):
        known = module.block == min(BLOCK, module.width)
        return ChainOp(name, "norm", module.width, module.width, "block") if known else None
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) and len(module.normalized_shape) == 1:
        size = int(module.normalized_shape[0])
        return ChainOp(name, "norm", size, size, "layer" if isinstance(module, nn.LayerNorm) else "rms")
    return None


def _first_linear(tower: list[ChainOp]) -> str:
    return next(op.name for op in tower if op.kind == "linear")


def describe(chain: ChainPlan) -> str:
    """A chain in a few lines: its time, then its kernels."""
    if chain.baseline_microseconds is None:
        beside = "; in bf16 not measured"
    else:
        beside = (
            f"; in bf16 {chain.baseline_microseconds:.1f} us, {chain.baseline_microseconds / chain.microseconds:.2f}x"
        )
    lines = [f"chain {' -> '.join(chain.ops)}: {chain.microseconds:.1f} us{beside}"]
    lines += [
        f"  {' + '.join(step.ops) or 'convert'}: {step.kernel}, {step.reads} -> {step.writes}, {step.microseconds:.1f} us"
        for step in chain.steps
    ]
    return "\n".join(lines)

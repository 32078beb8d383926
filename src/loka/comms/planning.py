"""One plan for all ranks: every rank's Probe merged on rank 0, judged there once, the same plan everywhere.

    probe = loka.Probe(model)                      # on every rank: DistributedModelParallel, FSDP2, DDP
    ...
    plan = plan_together(probe)
    loka.convert(model, plan)

The plan names the plain model's linears, whatever wraps it here, so that it fits the plain model too, and a plan made there fits here.
"""

from collections.abc import Callable

from torch import Tensor

from loka.comms.agreement import Agreement
from loka.probe import Probe
from loka.records import Plan, from_json, to_json


def plan_together(
    probe: Probe, judge: Callable[[Probe], Plan] | None = None, *, agreement: Agreement | None = None
) -> Plan:
    """Merge what all ranks have seen, judge it on rank 0, and give everybody the plan. Every rank must call it.

    Args:
        probe: this rank's; rank 0's holds everybody's statistics afterwards.
        judge: makes the plan of the merged probe, on rank 0 alone; `probe.evaluate().plan()` where None.
        agreement: among whom, and how long to wait; the default group and a minute where None.

    Returns:
        The plan, the same bytes on every rank.

    Raises:
        RankError: a rank is missing or failed, or holds another plan; it is named.

    Example:
        >>> plan = plan_together(probe, lambda p: p.evaluate(("rowwise",)).plan())
    """
    from safetensors.torch import load, save

    agreement = agreement or Agreement(name="planning")
    agreement.merge(lambda: save(_contiguous(probe)), lambda data: probe.merge(load(data)))
    decided = agreement.decide(lambda: to_json(judge(probe) if judge is not None else probe.evaluate().plan()))
    plan = from_json(decided, Plan)
    assert plan.seal is not None
    agreement.compare("the plan's digest", plan.seal.sha256.encode())
    return plan


def _contiguous(probe: Probe) -> dict[str, Tensor]:
    return {name: value.contiguous().clone() for name, value in probe.state_dict().items()}

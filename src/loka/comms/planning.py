"""One plan for all ranks: merge every rank's Probe on rank 0, make the plan there, and distribute it.

    probe = loka.Probe(model)                      # on every rank: DistributedModelParallel, FSDP2, DDP
    ...
    plan = plan_together(probe)
    loka.convert(model, plan)

The plan uses the names of the unwrapped model, so it can be exchanged between wrapped and plain models.
"""

from collections.abc import Callable

from loka.comms.agreement import Agreement
from loka.probe import Probe
from loka.records import Plan, from_json, to_json


def plan_together(
    probe: Probe, judge: Callable[[Probe], Plan] | None = None, *, agreement: Agreement | None = None
) -> Plan:
    """Merge the statistics of all ranks, make the plan on rank 0, and return it everywhere. Every rank must call it.

    Args:
        probe: this rank's Probe; that of rank 0 holds the statistics of all ranks afterwards.
        judge: makes the plan from the merged probe, on rank 0 only; None uses `probe.evaluate().plan()`.
        agreement: the group of ranks and the time limit; None uses the default group and a minute.

    Returns:
        The plan, identical on every rank.

    Raises:
        RankError: a rank is missing, failed, or has another plan; the message names it.

    Example:
        >>> plan = plan_together(probe, lambda p: p.evaluate(("rowwise",)).plan())
    """
    from safetensors.torch import load, save

    agreement = agreement or Agreement(name="planning")
    agreement.merge(
        lambda: save({name: value.contiguous().clone() for name, value in probe.state_dict().items()}),
        lambda data: probe.merge(load(data)),
    )
    decided = agreement.decide(lambda: to_json(judge(probe) if judge is not None else probe.evaluate().plan()))
    plan = from_json(decided, Plan)
    assert plan.seal is not None
    agreement.compare("the plan's digest", plan.seal.sha256.encode())
    return plan

"""Probe reports made by hand, so that a policy can be asked about any evidence."""

from loka.records import Candidate, Environment, Gemm, Interval, ProbeReport, Site

HERE = Environment(
    date="2026-01-01T00:00:00+00:00",
    command="test",
    loka="0",
    commit=None,
    python="3.11",
    torch="2",
    triton=None,
    device="test device",
    driver=None,
    cpu="test",
    threads=1,
)
SPECS = {"tensorwise": "e4m3:tensor", "rowwise": "e4m3:row"}


def interval(value: float, half: float = 0.0) -> Interval:
    return Interval(value=value, low=value - half, high=value + half)


def candidate(
    gemm: Gemm = "fprop",
    recipe: str = "tensorwise",
    error: float = 0.05,
    half: float = 0.01,
    speedup: float | None = None,
    refusal: str | None = None,
) -> Candidate:
    spec = SPECS[recipe]
    measured = interval(error, half)
    return Candidate(
        gemm=gemm,
        recipe=recipe,
        backend="reference",
        a=spec,
        b=spec,
        refusal=refusal,
        mere=None if refusal else measured,
        relative_l2=None if refusal else measured,
        speedup=None if speedup is None else interval(speedup, 0.01),
    )


def site(name: str, *candidates: Candidate, k: int = 16, n: int = 8, share: float = 0.5) -> Site:
    gemms = list(dict.fromkeys(c.gemm for c in candidates)) or ["fprop"]
    return Site(
        name=name,
        type="Linear",
        m=32,
        k=k,
        n=n,
        calls=1,
        flops_share=share,
        gemms=gemms,  # type: ignore[arg-type]
        stats=[],
        candidates=list(candidates),
        verdicts=[],
    )


def report(*sites: Site) -> ProbeReport:
    return ProbeReport(
        model="test",
        steps=10,
        sampled_steps=1,
        max_mere=0.2,
        max_gradient_error=0.1,
        flops_of="sites",
        rows=64,
        formats=[],
        sites=list(sites),
        environment=HERE,
    )

"""Records of a small job, made by hand: enough for every section of a report."""

from loka.dispatch import Policy, make_plan
from loka.records import (
    Candidate,
    Comparison,
    Environment,
    FormatRange,
    Gemm,
    GemmVerdict,
    Interval,
    Point,
    ProbeReport,
    Run,
    Site,
    TensorStats,
)
from loka.report import Results

HERE = Environment(
    date="2026-01-02T03:04:05+00:00",
    command="loka demo --seed 3",
    loka="0.1",
    commit="abc123",
    python="3.11",
    torch="2.13",
    triton=None,
    device="cpu",
    driver=None,
    cpu="two cores",
    threads=2,
)
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")
SPECS = {"tensorwise": "e4m3:tensor", "rowwise": "e4m3:row", "blockwise": "e4m3:1x128"}


def around(value: float, half: float) -> Interval:
    return Interval(value=value, low=value - half, high=value + half)


def make_site(number: int, count: int) -> Site:
    hard = number % 5 == 4
    candidates = []
    for gemm in GEMMS:
        for place, (recipe, spec) in enumerate(SPECS.items()):
            error = (0.3 if hard else 0.02) / (1 + 0.4 * place) * (1 + 0.03 * number % 1)
            candidates.append(
                Candidate(
                    gemm=gemm,
                    recipe=recipe,
                    backend="reference",
                    a=spec,
                    b=spec,
                    distribution="real rows",
                    samples=20,
                    mere=around(error, 0.1 * error),
                    relative_l2=around(error / 2, 0.05 * error),
                    sqnr_db=28.5,
                    saturated=0.0,
                    underflowed=0.01,
                )
            )
    stats = [
        TensorStats(
            role=role,
            elements=4000,
            non_finite=0,
            mean=0.1,
            std=1.0,
            absmax=9.0,
            abs_p99=2.5,
            abs_p999=4.0,
            kurtosis=3.0,
            zero_fraction=0.05,
            outlier_channels=int(hard),
            histogram_first=-20,
            histogram=[1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 800, 700, 400, 200, 90, 40, 12, 5, 2, 1],
        )
        for role in ("x", "w", "dy")
    ]
    verdicts = [
        GemmVerdict(
            gemm=gemm, safety="unsafe" if hard else "safe", speed="not measured", reason='because <it> & "that"'
        )
        for gemm in GEMMS
    ]
    return Site(
        name=f"core.layers.{number}.linear",
        type="Linear",
        m=512,
        k=256,
        n=128,
        calls=8,
        flops_share=1 / count,
        gemms=list(GEMMS),
        stats=stats,  # type: ignore[arg-type]
        candidates=candidates,
        verdicts=verdicts,
        metric_change=around(0.002 if hard else 0.0, 0.0004),
    )


def make_probe(sites: int = 10) -> ProbeReport:
    return ProbeReport(
        model="wukong small",
        steps=400,
        sampled_steps=8,
        max_mere=0.2,
        max_gradient_error=0.1,
        flops_of="model",
        rows=512,
        formats=[FormatRange(name="e4m3", max=448.0, smallest_normal=2.0**-6, smallest_subnormal=2.0**-9)],
        sites=[make_site(number, sites) for number in range(sites)],
        environment=HERE,
        sensitivity="log loss of 100 examples, the site alone",
    )


def make_run(name: str, precision: str, shift: float) -> Run:
    return Run(
        name=name,
        model="wukong small",
        data="complete-journey",
        precision=precision,
        seed=3,
        steps=100,
        examples=51200,
        seconds=20.0,
        curve=[Point(step=400 + 10 * i, loss=0.5 + shift - 0.002 * i + 0.003 * (i % 3)) for i in range(1, 11)],
        metrics={"log_loss": 0.51 + shift, "auc": 0.73, "ne": 0.9},
        low_precision_flops_share=0.0 if precision == "fp32" else 0.8,
        environment=HERE,
    )


def make_comparison(candidate: str, change: float, outcome: str) -> Comparison:
    return Comparison(
        metric="log loss",
        baseline="high precision",
        candidate=candidate,
        relative_change=around(change, 0.0003),
        margin=0.001,
        minimum_detectable=0.0005,
        outcome=outcome,  # type: ignore[arg-type]
        pairs=120_000,
        clusters=2_000,
        method="bca",
        low_precision_flops_share=0.8,
    )


def make_results(sites: int = 10) -> Results:
    probe = make_probe(sites)
    return Results(
        probe=probe,
        plans=(make_plan(probe, Policy(min_speedup=None)),),
        runs=(
            make_run("high precision", "fp32", 0.0),
            make_run("naive FP8", "tensorwise FP8", 0.004),
            make_run("planned FP8", "auto FP8", 0.0001),
        ),
        comparisons=(
            make_comparison("naive FP8", 0.0031, "worse"),
            make_comparison("planned FP8", 0.0001, "equivalent"),
        ),
    )

"""Records of a small job, made by hand: enough for every section of a report."""

from dataclasses import replace

from loka.dispatch import Policy, make_plan
from loka.records import (
    Candidate,
    Cause,
    Comparison,
    DistributionError,
    DriftReport,
    Environment,
    FormatRange,
    Gemm,
    GemmVerdict,
    Interval,
    ModChange,
    ModLeft,
    ModSummary,
    Move,
    PairedMetric,
    PairedTest,
    Point,
    ProbeReport,
    Quantized,
    QuantizedSite,
    Recovery,
    Run,
    Site,
    SplitCheck,
    TensorStats,
    VerdictChange,
)
from loka.records.ab import Overlap
from loka.records.performance import KernelBench, KernelRow, Origin, Peaks, PerformanceRow, PerformanceRows, RowGroup
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


SOURCES = {"rows": 1.0, "copula": 0.98, "gaussian": 0.9, "normal": 0.7}


def make_error(source: str, error: float) -> DistributionError:
    return DistributionError(
        source=source,  # type: ignore[arg-type]
        samples=20,
        rows=512,
        mere=around(error, 0.1 * error),
        relative_l2=around(error / 2, 0.05 * error),
        sqnr_db=around(28.5, 0.5),
        saturated=around(0.0, 0.0),
        underflowed=around(0.01, 0.001),
    )


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
                    distribution="rows",
                    samples=20,
                    mere=around(error, 0.1 * error),
                    relative_l2=around(error / 2, 0.05 * error),
                    sqnr_db=28.5,
                    saturated=0.0,
                    underflowed=0.01,
                    errors=[make_error(source, error * factor) for source, factor in SOURCES.items()],
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
    cause = Cause(text="one scale must span outlier channels", error=0.31, without=0.04, mod="block_norm")
    verdicts = [
        GemmVerdict(
            gemm=gemm,
            safety="unsafe" if hard else "safe",
            speed="not measured",
            reason='because <it> & "that"',
            suggested_mod="block_norm" if hard else None,
            causes=[cause] if hard else [],
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


def make_bench() -> KernelBench:
    rows = [
        KernelRow(
            op="scaled_mm",
            call=f"{m}x1024x1024 e4m3:tensor @ e4m3:tensor",
            shape={"m": m, "k": 1024, "n": 1024},
            backend=backend,
            microseconds=around(time * m / 1024, 0.1),
            speedup=None if backend == "bf16" else around(1.5, 0.01),
            roofline_microseconds=None if backend == "bf16" else 1.6 * m / 1024,
        )
        for m in (1024, 4096)
        for backend, time in (("bf16", 4.0), ("torch", 2.7), ("triton", 2.5))
    ]
    refused = KernelRow(op="scaled_mm", call="x", shape={}, backend="deepgemm", refusal="not <installed>")
    peaks = Peaks(copy_bytes_per_second=3e12, bf16_flops=8e14, fp8_flops=1.5e15)
    return KernelBench(method="CUDA graph", peaks=peaks, rows=[*rows, refused], environment=HERE)


def make_rows() -> PerformanceRows:
    origin = Origin(device="Some GPU", driver="1", torch="2.11", date="2026-01-01", commit=None, loka="0.1")
    rows = [
        PerformanceRow(
            op="linear",
            variant=f"fprop {spec} @ {spec}, weights dynamic",
            m=size,
            k=size,
            n=size,
            backend="triton",
            version="1",
            microseconds=around(10.0, 0.1),
            speedup=around(0.5 * (1 + place), 0.01),
        )
        for place, size in enumerate((256, 1024, 4096))
        for spec in SPECS.values()
    ]
    return PerformanceRows(groups=[RowGroup(origin=origin, rows=rows)])


def make_drift() -> DriftReport:
    move = Move(
        site="core.layers.4.linear", role="x", feature="absmax", since=0, step=200, before=1.0, after=3.5, sigmas=9.0
    )
    change = VerdictChange(site="core.layers.4.linear", before="safe", after="unsafe")
    return DriftReport(
        model="wukong", steps=400, window_steps=100, sites=10, too_short=[], moves=[move], judged=True, changes=[change]
    )


def make_mods() -> ModSummary:
    return ModSummary(
        model="wukong small",
        mods=["no_bias"],
        changed=[ModChange(mod="no_bias", site="core.layers.0.linear", effect="architecture", what="bias removed")],
        left=[ModLeft(mod="no_bias", site="core.head", why="it is the prediction layer")],
        removed=["core.layers.0.linear.bias"],
        notes=["train it"],
        environment=HERE,
        recovery=[Recovery(metric="log loss", before=0.5, after_mods=0.6, after_training=0.51, steps=100)],
    )


def make_quantized() -> Quantized:
    sites = [
        QuantizedSite(
            name=f"blocks.{i}.mlp",
            type="Linear",
            shape=[256, 1024],
            activation="e4m3:row",
            weight="e4m3:row",
            reason="safe",
            weight_error=0.02,
            metric_change=around(0.001 * i, 0.0005),
        )
        for i in range(4)
    ]
    return Quantized(
        model="onerec tiny", recipe="fp8", sites=sites, bytes_before=2000, bytes_after=1100, environment=HERE,
        metric="recall@10", bound=0.01, change=around(0.002, 0.001),
    )  # fmt: skip


def make_test() -> PairedTest:
    metric = PairedMetric(
        metric="recall@10", baseline=0.1, candidate=0.099, change=around(-0.01, 0.02), minimum_detectable=0.03, margin=0.01,
        outcome="inconclusive", users=500, method="bca",
    )  # fmt: skip
    return PairedTest(
        baseline="bf16", candidate="FP8", data="ml-1m", split=SplitCheck(observed=[500, 500], p_value=1.0, mismatch=False),
        metrics=[metric], overlap=[Overlap(n=10, share=0.93)], environment=HERE,
    )  # fmt: skip


def make_everything(sites: int = 10) -> Results:
    """Every kind of record a report knows."""
    base = make_results(sites)
    assert base.probe is not None
    naive = make_plan(base.probe, Policy(min_speedup=None, overrides={"*": "tensorwise"}))
    return replace(
        base,
        plans=(*base.plans, naive),
        drift=make_drift(),
        mods=(make_mods(),),
        benches=(make_bench(),),
        rows=(make_rows(),),
        quantized=(make_quantized(),),
        tests=(make_test(),),
    )

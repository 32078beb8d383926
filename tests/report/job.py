"""Records of a small job, made by hand: enough for every section of a report."""

from dataclasses import replace

import msgspec

from loka.dispatch import Policy, make_plan, uniform_plan
from loka.records import (
    Ablation,
    AblationCell,
    AblationLatency,
    Candidate,
    Cause,
    Comparison,
    DistributionError,
    DriftReport,
    EngineBar,
    EngineBench,
    EngineProfile,
    EngineRow,
    Environment,
    FormatRange,
    Gemm,
    GemmVerdict,
    Interval,
    MissingRun,
    ModChange,
    ModLeft,
    ModSummary,
    Move,
    PairedChange,
    PairedMetric,
    PairedTest,
    Point,
    ProbeReport,
    Quantized,
    QuantizedSite,
    Recovery,
    RefusedLatency,
    Run,
    Site,
    SplitCheck,
    TensorStats,
    TowerLatency,
    VerdictChange,
)
from loka.records.ab import Overlap
from loka.records.bench import KernelBench, KernelRow, Peaks
from loka.records.performance import Origin, PerformanceRow, PerformanceRows, RowGroup
from loka.records.speeds import SiteSpeed, TargetSpeeds
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


def make_speeds(probe: ProbeReport) -> TargetSpeeds:
    rows = [
        SiteSpeed(
            site=site.name,
            gemm=c.gemm,
            recipe=c.recipe,
            backend="triton",
            microseconds=around(12.0, 0.1),
            speedup=around(0.8 + 0.1 * (number % 7), 0.02),
            source="database row of 2026-01-01, Some GPU",
        )
        for number, site in enumerate(probe.sites)
        for c in site.candidates
        if number % 2 == 0
    ]
    return TargetSpeeds(target="Some GPU", rows=rows, notes=["rows of another machine"])


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


VARIANTS = ("none", "no_bias", "block_norm", "hard_swish", "all")


def make_cell(data: str, variant: str, precision: str) -> AblationCell:
    value = {"bf16": 0.0001, "naive": 0.004, "planned": -0.0002}[precision] * (1 + VARIANTS.index(variant))
    outcome = {"bf16": "equivalent", "naive": "worse", "planned": "inconclusive"}[precision]
    change = PairedChange(change=around(value, 0.0007), minimum_detectable=0.0008, outcome=outcome, seeds=5)  # type: ignore[arg-type]
    original = (variant, precision) == ("none", "bf16")
    return AblationCell(
        data=data, variant=variant, precision=precision, seeds=5, diverged=int(precision == "naive"), fp8_share=0.0 if precision == "bf16" else 0.87,
        log_loss=0.5123, auc=0.78, seconds=4.0, against_original=None if original else change,
        against_bf16=None if precision == "bf16" else change, against_naive=change if precision == "planned" else None,
    )  # fmt: skip


def make_ablation(data: tuple[str, ...] = ("ml-1m", "census", "journey")) -> Ablation:
    precisions = ("bf16", "naive", "planned")
    cells = [make_cell(d, v, p) for d in data for v in VARIANTS for p in precisions]
    missing = MissingRun(data=data[0], variant="all", precision="naive", seed=4, why="out of time")
    return Ablation(model="wukong small", settings={"size": "small"}, margin=0.001, runs=[], cells=cells, skipped=[missing], failed=[], seconds=9.0,
                    environment=HERE)  # fmt: skip


def make_latency() -> AblationLatency:
    rows = [
        TowerLatency(mode="infer", batch=batch, variant=variant, precision=precision, error=0.05, microseconds=around(200.0 / speed, 1.0),
                     speedup=around(speed, 0.03))
        for batch in (1024, 8192)
        for variant in VARIANTS
        for precision, speed in (("bf16", 1.0), ("tensorwise", 1.4), ("rowwise", 1.3), ("fused", 2.2))
        if precision != "fused" or variant in ("block_norm", "all")
    ]  # fmt: skip
    why = "a LayerNorm is <not> a BlockNorm"
    refused = [RefusedLatency(mode="infer", batch=1024, variant="none", precision="fused", why=why)]
    there = msgspec.structs.replace(HERE, device="Some GPU")
    return AblationLatency(
        tower="4096 -> 4096", method="CUDA graphs", settings={}, rows=rows, environment=there, refused=refused
    )


def make_engine() -> EngineBench:
    steps = (("eager", 90.0), ("compiled", 42.0), ("bf16", 22.0), ("fp8", 17.0))
    rows = [
        EngineRow(variant=name, batch=8, context=512, milliseconds=around(ms, 0.1), queries_per_second=8e3 / ms)
        for name, ms in steps
    ]
    late = EngineRow(
        variant="fp8", batch=16, context=512, milliseconds=around(30.0, 0.1), queries_per_second=533.0, run="<another>"
    )
    work = {"experts": 7.0, "linears": 4.0, "other": 6.0}
    profile = EngineProfile(variant="fp8", batch=8, context=512, by_kind=work)
    bars = [EngineBar(context=512, what="latency fp8 / compiled", value=0.4, bar="<= 0.51", met=True),
            EngineBar(context=512, what="throughput fp8 / bf16 engine", value=1.3, bar=">= 1.42", met=False)]  # fmt: skip
    there = msgspec.structs.replace(HERE, device="Some GPU")
    return EngineBench(model="onerec tiny", beams=512, rows=[*rows, late], profiles=[profile], bars=bars, notes=["a note"], environment=there)  # fmt: skip


def make_everything(sites: int = 10) -> Results:
    """Every kind of record a report knows."""
    base = make_results(sites)
    assert base.probe is not None
    naive = uniform_plan(base.probe, "tensorwise")
    return replace(
        base,
        plans=(*base.plans, naive),
        drift=make_drift(),
        mods=(make_mods(),),
        speeds=make_speeds(base.probe),
        benches=(make_bench(),),
        rows=(make_rows(),),
        quantized=(make_quantized(),),
        tests=(make_test(),),
        ablations=(make_ablation(),),
        latencies=(make_latency(),),
        engines=(make_engine(),),
    )

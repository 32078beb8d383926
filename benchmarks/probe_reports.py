"""The tables of docs/probe-reports.md, from the records that `loka probe` wrote.

    python benchmarks/probe_reports.py benchmarks/results/cpu/probe-*.json

Nothing is measured here: every number is read from a record, so that the page cannot say anything else.
"""

import argparse
import sys
from pathlib import Path

from loka.probe import Report
from loka.records import GEMMS, Interval, Site

LEARNED = ("rows", "copula", "gaussian")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    reports = [Report.load(path) for path in sorted(parser.parse_args().records)]
    print("\n".join([*verdicts(reports), "", *ratios(reports), "", *sensitivity(reports), "", *hard_sites(reports)]))
    return 0


def name(report: Report) -> str:
    return f"{report.record.model} on {report.record.data}"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def verdicts(reports: list[Report]) -> list[str]:
    rows = []
    for report in reports:
        record = report.record
        counts = []
        for gemm in GEMMS:
            found = [v.safety for site in record.sites for v in site.verdicts if v.gemm == gemm]
            counts.append(f"{found.count('safe')} of {len(found)}")
        safe = sum(site.flops_share for site in record.sites if all(v.safety == "safe" for v in site.verdicts))
        examined = f"{record.steps} / {record.sampled_steps}"
        rows.append([name(report), examined, *counts, f"{safe:.1%}", _samples(record.sites)])
    header = ["model", "steps / sampled", *(f"{gemm} safe" for gemm in GEMMS), "FLOPs in wholly safe sites", "samples"]
    return table(header, rows)


def _samples(sites: list[Site]) -> str:
    counts = sorted({e.samples for site in sites for c in site.candidates for e in c.errors})
    return ", ".join(map(str, counts))


def ratios(reports: list[Report]) -> list[str]:
    rows = []
    for report in reports:
        found = report.compare_sources()
        cells = [
            f"{ratio.mean:.2f} (largest {ratio.largest:.2f}, `{ratio.where}`)" if (ratio := found.get(source)) else ""  # type: ignore[call-overload]
            for source in LEARNED
        ]
        rows.append([name(report), *cells])
    return table(["model", *(f"{source} / N(0, 1)" for source in LEARNED)], rows)


def spell(change: Interval | None) -> str:
    if change is None:
        return "not measured"
    return f"{100 * change.value:+.3f} % [{100 * change.low:+.3f}, {100 * change.high:+.3f}]"


def sensitivity(reports: list[Report]) -> list[str]:
    rows = []
    for report in reports:
        record = report.record
        measured = [(site.metric_change, site) for site in record.sites if site.metric_change is not None]
        worst = max(measured, key=lambda pair: abs(pair[0].value), default=None)
        alone = f"`{worst[1].name}` ({worst[1].metric_recipe}): {spell(worst[0])}" if worst else ""
        rows.append([name(report), record.sensitivity or "", spell(record.combined_change), alone])
    return table(["model", "metric", "all safe sites together", "the site that changes it most, alone"], rows)


def hard_sites(reports: list[Report]) -> list[str]:
    rows = [
        [name(report), f"`{site.name}` {verdict.gemm}", verdict.reason, verdict.suggested_mod or ""]
        for report in reports
        for site in report.record.sites
        for verdict in site.verdicts
        if verdict.safety != "safe"
    ]
    return table(["model", "GEMM", "why it is not safe", "what would help"], rows) if rows else ["Every GEMM is safe."]


if __name__ == "__main__":
    sys.exit(main())

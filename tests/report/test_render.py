"""A report is one file that says what the records say, and asks the network for nothing."""

import base64
import json
import re
import subprocess
import sys
import zlib
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from loka import records
from loka.dispatch import Policy, make_plan
from loka.records import Conversion, Interval, LinkPlan, RecordError, UnitPlan
from loka.records.tuning import SizeEstimate, SizeEstimates, TunedUnit, Tuning
from loka.report import Pair, Results, render, render_pair, write_html
from loka.report.markup import size
from loka.report.payload import collect
from loka.report.results import read_any

from .job import make_comparison, make_everything, make_results


@pytest.fixture(scope="module")
def page() -> str:
    return render(make_results())


def embedded(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, object] = json.loads(found[1])
    return data


def chunk(page: str, number: int) -> list[dict[str, object]]:
    found = re.search(
        rf'<script type="[a-z/]+" id="chunk-{number}"( data-packed="deflate")?>(.*?)</script>', page, re.DOTALL
    )
    assert found is not None
    text = zlib.decompress(base64.b64decode(found[2])) if found[1] else found[2]
    sites: list[dict[str, object]] = json.loads(text)
    return sites


def test_it_says_what_the_comparison_says(page: str) -> None:
    assert "80\u202f% of the GEMM work in FP8, and the log loss stays within 0.1\u202f%" in page
    assert "+0.010\u202f%" in page
    assert "Naive FP8: +0.310\u202f%, worse." in page
    assert "not measured" in page


@pytest.mark.parametrize(
    ("outcome", "words"), [("worse", "makes the log loss 0.20\u202f% worse"), ("inconclusive", "too uncertain to call")]
)
def test_the_headline_follows_the_verdict(outcome: str, words: str) -> None:
    results = make_results()
    changed = (make_comparison("planned FP8", 0.002, outcome),)
    assert words in render(Results(results.probe, results.plans, results.runs, changed))


def test_a_plan_that_converts_nothing_is_no_success() -> None:
    """On a GPU where nothing is faster: the reason is the headline, and the run without FP8 is not taken for a control."""
    results = make_results()
    assert results.probe is not None
    slow = Interval(value=0.6, low=0.5, high=0.7)
    sites = [replace(s, candidates=[replace(c, speedup=slow) for c in s.candidates]) for s in results.probe.sites]
    probe = replace(results.probe, sites=sites)
    same = replace(
        make_comparison("planned FP8", 0.0, "equivalent"),
        relative_change=Interval(value=0.0, low=0.0, high=0.0),
        low_precision_flops_share=0.0,
    )
    page = render(Results(probe, (make_plan(probe, Policy(min_speedup=1.05)),), results.runs, (same,)))
    assert f"Nothing was converted: no GEMM of this model is faster in FP8 on {probe.environment.device}" in page
    assert "0.60×" in page
    assert f"speed-up over bf16 on {probe.environment.device}" in page  # the map has speed as its second axis
    assert "Nothing was converted: planned FP8 is the baseline itself" in page
    assert "perturbed" not in page


def test_it_is_self_contained(page: str) -> None:
    """No reference that a browser would fetch; the namespace and schema addresses in the library are names, not links."""
    assert "default-src 'none'" in page
    own = page.replace(page[page.index("<script>") : page.rindex("<script>")], "")
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)""", own)
    assert "@import" not in own
    assert "url(" not in own
    assert "/root" not in own
    assert len(page) < 3_000_000


def test_hostile_names_stay_text() -> None:
    results = make_results(2)
    assert results.probe is not None
    site = msgspec.structs.replace(results.probe.sites[0], name="</script><script>alert(1)</script>")
    probe = msgspec.structs.replace(results.probe, sites=[site], model="<b>bold</b>")
    page = render(Results(probe=probe))
    assert "alert(1)</script>" not in page
    assert "<b>bold" not in page
    assert embedded(page)["names"] == [site.name]
    assert chunk(page, 0)[0]["name"] == site.name


def test_every_site_and_choice_travels_with_the_page(page: str) -> None:
    data = embedded(page)
    assert data["names"] == [f"core.layers.{i}.linear" for i in range(10)]
    assert len(data["table"]) == 10  # type: ignore[arg-type]
    details = chunk(page, 0)
    assert [len(site["choices"]) for site in details] == [3] * 10  # type: ignore[arg-type]
    assert [site["name"] for site in details] == data["names"]
    assert set(data["charts"]) == {"histogram", "comparisons", "curves", "gaps", "sites", "sensitivity"}  # type: ignore[call-overload]


def test_every_kind_of_record_has_its_section() -> None:
    text = render(make_everything())
    for anchor in ("quality", "sites", "plan", "mods", "drift", "memory", "kernels", "generative", "made"):
        assert f'<section id="{anchor}"' in text
    assert "A verdict would change at 1 site: core.layers.4.linear: safe → unsafe" in text
    assert "93.0\u202f% of the top 10" in text
    assert "not &lt;installed&gt;" in text  # a refused kernel stays, with its reason


def test_two_reports_on_one_page() -> None:
    before, after = make_results(6), make_results(5)
    text = render_pair(Pair(before, after, ("old", "new")))
    assert "5 sites are in both, 1 only in old, 0 only in new" in text
    assert "core.layers.5.linear: gone" in text
    assert re.search(r"\d+ runs in both; none of the verdicts differ\.", text)
    with pytest.raises(ValueError, match="both reports are called"):
        Pair(before, after, ("same", "same"))


def test_many_sites_are_packed() -> None:
    text = render(make_everything(250))
    assert chunk(text, 9)[24]["name"] == "core.layers.249.linear"
    assert text.count("data-packed") == 10


def test_parts_may_be_absent() -> None:
    results = make_results()
    only_probe = render(Results(probe=results.probe))
    assert "16 of 30 GEMMs" not in only_probe
    assert "24 of 30 GEMMs are accurate enough in FP8" in only_probe
    assert 'option value="unsafe"' in only_probe  # the table of verdicts
    only_runs = render(Results(runs=results.runs[:1]))
    assert 'id="sites"' not in only_runs
    assert "Training loss" in only_runs
    assert "<h1>Training runs</h1>" in only_runs
    assert "<h1>A plan: " in render(Results(plans=results.plans[:1]))


def test_a_folder_of_records_is_read_by_kind(tmp_path: Path) -> None:
    results = make_results()
    assert results.probe is not None
    for name, record in {
        "a": results.probe,
        "b": results.plans[0],
        **{f"run{i}": run for i, run in enumerate(results.runs)},
        **{f"cmp{i}": c for i, c in enumerate(results.comparisons)},
    }.items():
        records.save(record, tmp_path / f"{name}.json")
    (tmp_path / "evidence.json").write_text('{"fingerprint": "x", "known": {}}')  # of tune, in the same folder
    loaded = Results.load(tmp_path)
    assert loaded.probe == results.probe
    assert [c.candidate for c in loaded.ordered_comparisons] == ["planned FP8", "naive FP8"]
    assert [run.name for run in loaded.ordered_runs] == ["high precision", "planned FP8", "naive FP8"]
    write_html(loaded, tmp_path / "out" / "report.html")
    assert (tmp_path / "out" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no records"):
        Results.load(tmp_path)
    (tmp_path / "x.json").write_text('{"kind": "soup"}')
    with pytest.raises(RecordError, match=r"x\.json.*'soup'"):
        Results.load(tmp_path)
    (tmp_path / "x.json").write_text('{"kind": "plan", "sch')
    with pytest.raises(RecordError, match="truncated or damaged"):
        Results.load(tmp_path)


def test_a_record_that_is_not_there_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"none\.json: cannot be read: No such file or directory"):
        read_any(tmp_path / "none.json")


def test_it_needs_no_torch() -> None:
    code = "import sys, loka.report; assert not {'torch', 'numpy', 'vl_convert'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_tune_that_converts_nothing_is_no_success() -> None:
    results = make_results()
    assert results.probe is not None
    plan = make_plan(results.probe, Policy(min_speedup=1e9))
    tuning = Tuning(model="Ranker", target="train", margin=2e-4, used_margin=2e-4, units=[], plan=plan, environment=results.probe.environment)  # fmt: skip
    same = replace(
        make_comparison("planned FP8", 0.0, "equivalent"), relative_change=Interval(value=0.0, low=0.0, high=0.0), low_precision_flops_share=0.0
    )  # fmt: skip
    page = render(Results(runs=results.runs, comparisons=(same,), tunings=(tuning,)))
    assert "Nothing was converted: no part of this model is both faster in FP8 and within the margin" in page
    assert "Planned FP8 is high precision itself, so there is nothing to compare." in page


def test_tune_heads_its_page_with_speed_and_loss_and_claims_nothing_that_was_not_measured() -> None:
    results = make_results()
    assert results.probe is not None
    unit = TunedUnit("tower.0", ["tower.0", "tower.2"], "chain", 0.9, "safe")
    kept = TunedUnit("head", ["head"], "high", 0.1, "a prediction layer")
    tuning = Tuning(model="Ranker", target="train", margin=2e-4, used_margin=2e-4, units=[unit, kept], plan=make_plan(results.probe, Policy(min_speedup=1e9)), environment=results.probe.environment, speed_note="no GPU here")  # fmt: skip
    sizes = SizeEstimates("NVIDIA H200", "made up", SizeEstimate("small", 512, Interval(0.9, 0.8, 1.0), 0.0), SizeEstimate("wide", 8192, Interval(1.4, 1.2, 1.6), 0.9), tuning.environment)  # fmt: skip
    timed = replace(tuning, speedup=Interval(1.334, 1.33, 1.34), metric_change=Interval(-1e-4, -2e-4, 1e-5))
    for given, wanted, absent in (
        (Results(tunings=(timed,)), ("Whole step", "1.33×", "Change of the loss", "−0.010 %", "90.0 %", "2 of 3"), "not measured"),
        (Results(tunings=(tuning,), sizes=(sizes,)), ("Estimated for NVIDIA H200", "1.40×", "not measured"), "Whole step</span>"),
        (Results(tunings=(tuning,)), ("Speed", "not measured", "no GPU here"), "Whole step</span>"),
    ):  # fmt: skip
        tiles = render(given).partition('<ul class="tiles">')[2].partition("</ul>")[0]
        assert [words for words in wanted if words not in tiles.replace("\u202f", " ")] == []
        assert absent not in tiles


def test_small_models_have_a_size() -> None:
    assert [size(n).replace("\u202f", " ") for n in (43_000, 1_500_000, 2_340_000_000)] == [
        "43 kB",
        "1.5 MB",
        "2.34 GB",
    ]


def test_a_page_of_tune_says_what_was_found_once() -> None:
    results = make_results()
    assert results.probe is not None
    unit = TunedUnit("tower.0", ["tower.0", "tower.2"], "chain", 0.9, "safe")
    plan = replace(
        make_plan(results.probe, Policy(min_speedup=1e9)),
        units=[UnitPlan(name="tower.0", links=[LinkPlan(linear="tower.0", k=64, n=64)])],
    )
    tuning = Tuning(model="Ranker", target="train", margin=2e-4, used_margin=2e-4, units=[unit], plan=plan, environment=results.probe.environment, speed_note="no GPU here", metric_change=Interval(1e-5, -1e-5, 2e-5))  # fmt: skip
    done = Conversion(model="Ranker", converted={"tower.0": "in chain tower.0"}, kept={}, environment=tuning.environment, low_precision_share=0.8, flops_of="model", notes=["auto is reference on cpu", "measure again"])  # fmt: skip
    page = render(Results(tunings=(tuning,), conversions=(done,))).replace("\u202f", " ")
    assert page.count("+0.0010% [-0.0010%, +0.0020%]") == 1
    assert page.count("no GPU here") == 1
    assert "of the linears' FLOPs; 80.0 % of the model's GEMM FLOPs" in page.replace("&#x27;", "'")
    folded = page.partition("<summary>Which kernels")[2].partition("</details>")[0]
    assert "auto is reference" in folded
    assert "measure again" not in folded
    assert 'tower.<wbr>0</span>&nbsp;→ <span class="dotted">tower.<wbr>2' in page


def test_the_legend_names_only_recipes_with_a_measured_error() -> None:
    results = make_results(2)
    assert results.probe is not None
    first = results.probe.sites[0]
    empty = replace(first.candidates[0], recipe="delayed", mere=None, relative_l2=None, errors=[])
    probe = replace(results.probe, sites=[replace(first, candidates=[*first.candidates, empty])])
    charts = json.dumps(collect(Results(probe=probe))["charts"])
    assert "delayed" not in charts
    assert "rowwise" in charts


def test_a_plan_of_chains_is_told_as_one() -> None:
    """A folder of `loka tune` holds its plan, whose sites say nothing of the chains that they are in."""
    results = make_results()
    assert results.probe is not None
    plan = make_plan(results.probe, Policy(min_speedup=1e9))
    first = plan.sites[0]
    links = [LinkPlan(linear=first.site, k=first.k, n=first.n)]
    planned = replace(plan, units=[UnitPlan(name=first.site, links=links)])
    unit = TunedUnit(first.site, [first.site], "chain", 0.6, "safe")
    tuning = Tuning(model="Ranker", target="train", margin=2e-4, used_margin=2e-4, units=[unit], plan=planned, environment=results.probe.environment, speedup=Interval(1.4, 1.3, 1.5))  # fmt: skip
    tiles = (
        render(Results(plans=(planned,), tunings=(tuning,))).partition('<ul class="tiles">')[2].partition("</ul>")[0]
    )
    assert "1.40×" in tiles
    assert "1 of 1" in tiles
    assert "not measured" not in tiles
    assert f"A plan: 1 of {len(plan.sites)} sites in FP8" in render(Results(plans=(planned,)))
    assert "error limits 0.2 (MERE" in render(Results(plans=(planned,)))
    assert "no limits on the errors" in render(
        Results(plans=(replace(planned, max_error=1.0, max_gradient_error=1.0),))
    )
    table = collect(Results(plans=(planned,)))["table"]
    assert [row.get("h") for row in table[:2]] == [1, None]


def test_what_tune_did_is_said_in_words_and_reasons_stay_readable() -> None:
    results = make_results()
    assert results.probe is not None
    unit = TunedUnit(name="head", linears=("head",), way="high", flops_share=1.0, reason="it is a prediction layer")
    tuning = Tuning(model="Ranker", target="train", margin=2e-4, used_margin=2e-4, units=[unit], plan=make_plan(results.probe, Policy(min_speedup=1e9)), environment=results.probe.environment)  # fmt: skip
    page = render(Results(tunings=(tuning,)))
    assert "judged by swapping FP8 in on held-out examples; gradients by the predicted change." in page
    assert '<td class="why">it is a prediction layer</td>' in page  # wide enough to read where the table scrolls
    served = render(Results(tunings=(replace(tuning, gradients="none: serving"),)))
    assert "a served model has no gradients" in served

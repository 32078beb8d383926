"""The report in a real browser: no error, no request, charts drawn, filters and pages of sites work, wide and narrow, light and dark."""

import json
import time
from typing import Any

import pytest

from loka.report import Pair, render, render_pair

from .browser import NAMES, find_browser, visit
from .job import make_everything, make_results

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_browser() is None,
        reason=f"NOT TESTED: the report in a browser; none of {', '.join(NAMES)} is installed",
    ),
]

CHARTS = ("comparisons", "curves", "gaps", "sites", "sensitivity", "drift", "roofline-0", "rows-0", "waterfall-0")  # fmt: skip
TOUR = (
    f"const CHARTS = {json.dumps(CHARTS)};"
    + """
    const marks = (id) => document.querySelectorAll(`#chart-${id} svg path, #chart-${id} svg line`).length;
    for (const id of CHARTS) check(id, marks(id));
    check("sideways", document.documentElement.scrollWidth - document.documentElement.clientWidth);

    const before = document.querySelector("#chart-sites svg").outerHTML;
    document.getElementById("gemm-dgrad").click();
    await wait(() => document.querySelector("#chart-sites svg")?.outerHTML !== before);
    check("tab", true);

    const shown = () => [...document.querySelectorAll("#plan-table tbody tr")].filter((row) => !row.hidden).length;
    check("all", shown());
    const search = document.getElementById("plan-search"), kind = document.getElementById("plan-kind");
    search.value = "layers.1"; search.dispatchEvent(new Event("input"));
    await wait(() => shown() < 10);
    check("searched", [shown(), document.getElementById("plan-count").textContent]);
    search.value = ""; search.dispatchEvent(new Event("input"));
    await wait(() => shown() === 10);
    kind.value = "kept"; kind.dispatchEvent(new Event("change"));
    check("kept", shown());
    kind.value = "all"; kind.dispatchEvent(new Event("change"));

    const page = document.getElementById("site-page");
    check("hidden", page.hidden);
    document.querySelector("button[data-site]").click();
    await wait(() => page.dataset.site);
    check("site", { title: page.querySelector("h3").textContent, bars: page.querySelectorAll(".operands svg").length,
                    rows: page.querySelectorAll("tbody tr").length, focus: document.activeElement.tagName, hash: location.hash,
                    here: page.querySelectorAll("tr.here").length });
    check("cut", Math.max(...[...page.querySelectorAll(".scroll")].map((frame) => frame.scrollWidth - frame.clientWidth)));
    [...page.querySelectorAll("button.step")].find((b) => b.textContent === "next").click();
    await wait(() => page.dataset.site === "core.layers.1.linear");
    check("next", true);

    const point = document.querySelector("#chart-sites .mark-symbol path");
    const box = point.getBoundingClientRect();
    const at = { bubbles: true, clientX: box.x + box.width / 2, clientY: box.y + box.height / 2 };
    page.dataset.site = "";
    for (const type of ["mousedown", "mouseup", "click"]) point.dispatchEvent(new MouseEvent(type, at));
    await wait(() => page.dataset.site);
    check("clicked", page.dataset.site);
    document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
    check("closed", page.hidden);
    check("background", getComputedStyle(document.body).backgroundColor);
"""
)


def expect_clean(report: dict[str, Any]) -> dict[str, Any]:
    assert report["errors"] == []
    assert report["blocked"] == []
    assert report["resources"] == []
    values: dict[str, Any] = report["values"]
    return values


@pytest.fixture(scope="module")
def tour() -> dict[str, Any]:
    return expect_clean(visit(render(make_everything()), TOUR))


def test_every_chart_is_drawn(tour: dict[str, Any]) -> None:
    assert all(tour[chart] > 3 for chart in CHARTS), tour
    assert tour["tab"]


def test_the_plan_can_be_searched(tour: dict[str, Any]) -> None:
    assert tour["all"] == 10
    assert tour["searched"] == [1, "1 of 10 sites"]
    assert tour["kept"] == 2


def test_a_site_has_a_page(tour: dict[str, Any]) -> None:
    assert tour["hidden"]
    assert tour["site"] == {
        "title": "core.layers.0.linear",
        "bars": 3,
        "rows": 3 + 9,
        "focus": "H3",
        "hash": "#site=core.layers.0.linear",
        "here": 3,
    }
    assert tour["next"]
    assert tour["clicked"].startswith("core.layers.")
    assert tour["closed"]


def test_nothing_runs_over_the_edge(tour: dict[str, Any]) -> None:
    assert tour["sideways"] <= 0
    assert tour["cut"] <= 0, "the candidates of a site fit the page at 1300 pixels"


def test_words_are_explained_on_the_page() -> None:
    page = render(make_everything())
    assert all(f"<dt>{word}</dt>" in page for word in ("MERE", "copula", "origin", "SQNR"))


def test_narrow_and_dark(tour: dict[str, Any]) -> None:
    narrow = expect_clean(visit(render(make_everything()), TOUR, width=500, dark=True))
    assert narrow["sideways"] <= 0
    assert narrow["background"] != tour["background"]


def test_names_are_not_squeezed_on_a_phone_and_a_cut_table_shows_it() -> None:
    script = """
        const names = [...document.querySelectorAll("td button.link")].map((name) => name.getBoundingClientRect().width);
        check("least", Math.min(...names));
        check("shadow", getComputedStyle(document.querySelector(".scroll")).backgroundAttachment);
    """
    values = expect_clean(visit(render(make_everything()), script, width=500))
    assert values["least"] > 120
    assert values["shadow"] == "local, local, scroll, scroll"


def test_paper_shows_what_is_folded() -> None:
    script = """
        const folded = () => [...document.querySelectorAll("details")].filter((d) => !d.open).length;
        check("before", folded());
        dispatchEvent(new Event("beforeprint"));
        check("printed", folded());
        dispatchEvent(new Event("afterprint"));
        check("after", folded());
        const table = document.querySelector('[aria-label="Quantized sites"]');
        check("keys", [table.tabIndex, table.querySelectorAll("tbody tr").length]);
    """
    values = expect_clean(visit(render(make_everything()), script))
    assert values["before"] == values["after"] > 1
    assert values["printed"] == 0
    assert values["keys"] == [0, len(make_everything().quantized[0].sites)]


def test_two_thousand_sites_stay_usable() -> None:
    page = render(make_everything(2000))
    assert len(page) < 6_000_000
    script = """
        const rows = () => document.querySelectorAll("#plan-table tbody tr").length;
        check("first", rows());
        const search = document.getElementById("plan-search"), started = performance.now();
        search.value = "layers.1999"; search.dispatchEvent(new Event("input"));
        await wait(() => rows() === 1);
        check("filter", performance.now() - started);
        const opened = performance.now();
        document.querySelector("button[data-site]").click();
        await wait(() => document.getElementById("site-page").dataset.site);
        check("title", document.querySelector("#site-page h3").textContent);
        check("open", performance.now() - opened);
        search.value = ""; search.dispatchEvent(new Event("input"));
        await wait(() => rows() === 100);
        document.getElementById("plan-next").click();
        check("page", document.getElementById("plan-page").textContent);
        check("second", document.querySelector("#plan-table button").textContent);
    """
    start = time.monotonic()
    values = expect_clean(visit(page, script))
    assert values["first"] == 100
    assert values["title"] == "core.layers.1999.linear"
    assert (values["page"], values["second"]) == ("page 2 of 20", "core.layers.100.linear")
    assert time.monotonic() - start < 120


def test_two_reports_compare() -> None:
    before, after = make_results(6), make_results(5)
    page = render_pair(Pair(before, after, ("old", "new")))
    values = expect_clean(
        visit(page, "check('points', document.querySelectorAll('#chart-pair .mark-symbol path').length);")
    )
    assert values["points"] == 15


def test_a_probe_alone() -> None:
    results = make_results(3)
    from loka.report import Results

    expect_clean(visit(render(Results(probe=results.probe)), "check('drawn', true);"))

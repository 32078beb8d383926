"use strict";
// Draws the charts, filters the plan, opens a site's page. All data is in the page; nothing is fetched.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const views = new Map();
  const roles = { x: "Input x", w: "Weight W", dy: "Output gradient dy" };

  function theme() {
    const css = getComputedStyle(document.documentElement);
    const colour = (name) => css.getPropertyValue(`--${name}`).trim();
    const names = ["accent", "second", "third", "quiet", "alarm", "ink"];
    const font = getComputedStyle(document.body).fontFamily;
    const text = { labelColor: colour("soft"), titleColor: colour("soft"), labelFont: font, titleFont: font, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal" };
    return {
      params: names.map((name) => ({ name, value: colour(name) })),
      config: {
        background: "transparent", font, view: { stroke: null },
        axis: { ...text, gridColor: colour("line"), domain: false, ticks: false, labelPadding: 6, gridDash: [2, 3], titlePadding: 10 },
        legend: { ...text, symbolStrokeWidth: 2, labelLimit: 240, offset: 4 },
      },
    };
  }

  async function draw(element, spec) {
    const { params, config } = theme();
    const narrow = element.clientWidth < 520;
    const copy = JSON.parse(JSON.stringify(spec), (key, value) => (key === "labelLimit" && narrow ? Math.min(value, 120) : value));
    copy.params = [...(copy.params || []), ...params];
    copy.config = config;
    const points = data.sites.reduce((sum, site) => sum + site.candidates.length, 0);
    views.get(element)?.finalize();
    const result = await vegaEmbed(element, copy, { actions: false, renderer: points > 2000 ? "canvas" : "svg", tooltip: { theme: "custom" } });
    views.set(element, result);
    element.dataset.drawn = "yes";
    return result.view;
  }

  // The map of sites

  function candidates() {
    const rows = [];
    data.sites.forEach((site, index) => {
      for (const c of site.candidates) {
        const error = c.gemm === "fprop" ? c.mere : c.relative_l2;
        if (error) rows.push({ site: site.name, index, gemm: c.gemm, recipe: c.recipe, backend: c.backend, error: error.value, low: error.low, high: error.high, limit: data.limits[c.gemm], ...(c.speedup ? { speedup: c.speedup.value } : {}) });
      }
    });
    return rows;
  }

  async function drawSites() {
    const element = document.getElementById("chart-sites");
    if (!element) return;
    const spec = { ...data.charts.sites, data: { values: candidates() } };
    const view = await draw(element, spec);
    const chosen = document.querySelector('input[name="gemm"]:checked');
    await view.signal("gemm", chosen ? chosen.value : "fprop").runAsync();
    view.addEventListener("click", (event, item) => item?.datum?.site && openSite(item.datum.site));
  }
  document.querySelectorAll('input[name="gemm"]').forEach((input) => input.addEventListener("change", drawSites));

  // A site's page

  const byName = new Map(data.sites.map((site, index) => [site.name, index]));
  const number = (value, digits = 3) => (value === null || value === undefined ? "not measured" : Math.abs(value) > 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5) ? value.toExponential(2) : String(Number(value.toPrecision(digits))));
  const interval = (i) => (i ? `${number(i.value)} [${number(i.low)}, ${number(i.high)}]` : "not measured");

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }
  function table(head, rows, numeric = []) {
    const cell = (tag, value, i) => make(tag, { class: numeric.includes(i) ? "n" : "", ...(tag === "th" ? { scope: "col" } : {}) }, value);
    const body = make("tbody");
    for (const row of rows) body.append(make("tr", row.here ? { class: "here" } : {}, ...row.cells.map((v, i) => cell("td", v, i))));
    return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...head.map((v, i) => cell("th", v, i)))), body));
  }
  const chip = (word) => make("span", { class: `chip ${{ safe: "good", fast: "good", unsafe: "bad", slow: "bad" }[word] || ""}` }, word);

  function histogramOf(stats, format) {
    const total = stats.elements - stats.non_finite || 1;
    const bins = stats.histogram.map((count, i) => ({ from: stats.histogram_first + i, to: stats.histogram_first + i + 1, share: count / total }));
    if (!bins.length || !stats.absmax || !format) return null;
    const scale = Math.log2(stats.absmax) - Math.log2(format.max);
    const [low, high] = [bins[0].from, bins[bins.length - 1].to];
    const edges = [scale + Math.log2(format.max), scale + Math.log2(format.smallest_normal), scale + Math.log2(format.smallest_subnormal) - 1];
    const clip = (value) => Math.min(Math.max(value, low), high);
    const bands = [
      { band: "full precision", from: clip(edges[1]), to: clip(edges[0]) },
      { band: "losing bits", from: clip(edges[2]), to: clip(edges[1]) },
      { band: "becomes zero", from: low, to: clip(edges[2]) },
    ].filter((band) => band.to > band.from);
    const spec = JSON.parse(JSON.stringify(data.charts.histogram));
    spec.layer[0].data.values = bands;
    spec.layer[1].data.values = bins;
    return spec;
  }

  async function openSite(name, { move = true } = {}) {
    const index = byName.get(name);
    if (index === undefined) return;
    const site = data.sites[index], chosen = data.choices[name] || [];
    const page = document.getElementById("site-page");
    page.hidden = false;
    page.replaceChildren();
    const steps = make("span", {});
    for (const [label, to] of [["previous", index - 1], ["next", index + 1]]) {
      const button = make("button", { class: "step", type: "button" }, label);
      button.disabled = !data.sites[to];
      button.addEventListener("click", () => openSite(data.sites[to].name));
      steps.append(button, " ");
    }
    const heading = make("h3", { tabindex: "-1" }, make("span", { class: "mono" }, site.name));
    page.append(make("div", { class: "title" }, heading, steps));
    page.append(make("p", { class: "facts" }, `${site.type}, M ${site.m} × K ${site.k} × N ${site.n}, ${site.calls} sampled calls, ${(100 * site.flops_share).toFixed(1)} % of the ${data.flopsOf} GEMM FLOPs${site.metric_change ? `; alone in FP8 it changes the loss by ${(100 * site.metric_change.value).toFixed(3)} % [${(100 * site.metric_change.low).toFixed(3)}, ${(100 * site.metric_change.high).toFixed(3)}]` : ""}`));
    page.append(table(["GEMM", "error", "speed", "why", "runs", "would help"], site.verdicts.map((v) => {
      const choice = chosen.find((c) => c.gemm === v.gemm);
      return { cells: [v.gemm, chip(v.safety), chip(v.speed), v.reason, choice ? (choice.a ? `${choice.a} @ ${choice.b}` : "high precision") : "no plan", v.suggested_mod || "–"] };
    })));
    page.append(make("h3", {}, "Distributions"), make("p", { class: "facts" }, "Magnitudes in powers of two. The bands are E4M3 with one scale for the whole tensor: finer scales move the bands with each row or block."));
    page.append(make("p", { class: "legend" }, ...["full precision", "losing bits", "becomes zero"].flatMap((band, i) => [make("span", { class: `swatch band${i}` }), make("span", {}, band)])));
    const operands = make("div", { class: "operands" });
    page.append(operands);
    const drawings = [];
    for (const stats of site.stats) {
      const chart = make("div", { class: "chart", role: "img", "aria-label": `Histogram of ${roles[stats.role]}` });
      operands.append(make("div", {}, make("h4", {}, roles[stats.role]),
        make("p", { class: "facts" }, `absmax ${number(stats.absmax)}, 99 % below ${number(stats.abs_p99)}, std ${number(stats.std)}, kurtosis ${number(stats.kurtosis)}, ${(100 * stats.zero_fraction).toFixed(1)} % zeros, ${stats.outlier_channels} outlier channels`), chart));
      const spec = histogramOf(stats, data.formats.find((f) => f.name === "e4m3") || data.formats[0]);
      if (spec) drawings.push(() => draw(chart, spec));
    }
    page.append(make("h3", {}, "Candidates"));
    page.append(table(["GEMM", "recipe", "operands", "on", "MERE", "relative L2", "SQNR, dB", "underflow", "speed-up"], site.candidates.map((c) => {
      const here = chosen.some((x) => x.gemm === c.gemm && x.a === c.a && x.b === c.b && x.backend === c.backend);
      const measured = c.refusal ? [`refused: ${c.refusal}`, "", "", ""] : [interval(c.mere), interval(c.relative_l2), number(c.sqnr_db), c.underflowed == null ? "–" : `${(100 * c.underflowed).toFixed(2)} %`];
      return { here, cells: [c.gemm, c.recipe, make("span", { class: "mono" }, `${c.a} @ ${c.b}`), c.backend, ...measured, interval(c.speedup)] };
    }), [4, 5, 6, 7]));
    page.append(make("p", { class: "facts" }, "Highlighted: what the plan runs."));
    if (move) {
      history.replaceState(null, "", `#site=${encodeURIComponent(name)}`);
      page.scrollIntoView({ block: "start" });
      heading.focus({ preventScroll: true });
    }
    for (const job of drawings) await job();
    page.dataset.site = name;
  }
  document.querySelectorAll("button[data-site]").forEach((button) => button.addEventListener("click", () => openSite(button.dataset.site)));

  // The plan's filters

  const search = document.getElementById("plan-search"), kind = document.getElementById("plan-kind"), count = document.getElementById("plan-count");
  const rows = [...document.querySelectorAll("#plan-table tbody tr")];
  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.dataset.text;
      const keep = words.every((word) => text.includes(word)) && (kind.value === "all" || row.dataset.kind === kind.value);
      row.hidden = !keep;
      shown += keep;
    }
    count.textContent = `${shown} of ${rows.length} sites`;
  }
  if (search) {
    search.addEventListener("input", filter);
    kind.addEventListener("change", filter);
    filter();
  }

  // Start, and again when the colour scheme changes

  async function drawAll() {
    for (const [name, spec] of Object.entries(data.charts)) {
      const element = document.getElementById(`chart-${name}`);
      if (!element || name === "sites") continue;
      const view = await draw(element, spec);
      view.addEventListener("click", (event, item) => item?.datum?.site && openSite(item.datum.site));
    }
    await drawSites();
    const page = document.getElementById("site-page");
    if (page && !page.hidden) await openSite(page.dataset.site, { move: false });
    document.documentElement.dataset.ready = "yes";
  }
  const wanted = decodeURIComponent((location.hash.match(/^#site=(.*)$/) || [])[1] || "");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll().then(() => wanted && openSite(wanted)).catch((error) => console.error(error));
})();

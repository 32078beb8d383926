"use strict";
// Draws the charts, filters and pages the table, opens a site's page. All data is in the page; nothing is fetched.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement, byId = (id) => document.getElementById(id);
  const views = new Map();
  const roles = { x: "Input x", w: "Weight W", dy: "Output gradient dy" };
  const gemms = ["fprop", "dgrad", "wgrad"];
  const sources = { rows: "real rows", copula: "copula", gaussian: "Gaussian", normal: "N(0, 1)" };
  const word = (number) => (number === null || number === undefined ? null : data.words[number]);

  // Light and dark: follow the system until the reader chooses

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const setScheme = (scheme) => { root.dataset.scheme = scheme; };
  setScheme(dark.matches ? "dark" : "light");

  function theme() {
    const css = getComputedStyle(root);
    const colour = (name) => css.getPropertyValue(`--${name}`).trim();
    const names = ["accent", "second", "third", "quiet", "alarm", "ink", "soft"];
    const font = getComputedStyle(document.body).fontFamily;
    const text = { labelColor: colour("soft"), titleColor: colour("soft"), labelFont: font, titleFont: font, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal" };
    return {
      params: names.map((name) => ({ name, value: colour(name) })),
      config: {
        background: "transparent", font, view: { stroke: null },
        axis: { ...text, gridColor: colour("line"), domain: false, ticks: false, labelPadding: 6, gridDash: [2, 3], titlePadding: 10 },
        legend: { ...text, symbolStrokeWidth: 2, labelLimit: 240, offset: 4, columns: 4 },
      },
    };
  }

  async function draw(element, spec, points = 0) {
    const { params, config } = theme();
    const narrow = element.clientWidth < 520;
    const copy = JSON.parse(JSON.stringify(spec), (key, value) => (key === "labelLimit" && narrow ? Math.min(value, 120) : value));
    if (narrow) config.legend.columns = 2;
    copy.params = [...(copy.params || []), ...params];
    copy.config = config;
    views.get(element)?.finalize();
    const result = await vegaEmbed(element, copy, { actions: false, renderer: points > 1500 ? "canvas" : "svg", tooltip: { theme: "custom" } });
    views.set(element, result);
    element.dataset.drawn = "yes";
    result.view.addEventListener("click", (event, item) => item?.datum?.site && openSite(item.datum.site));
    return result.view;
  }

  // The map of sites. Exact products have errors around 1e-8, which would squeeze all others together, so they are drawn at TINY.

  const TINY = 1e-3;
  const asked = (name, otherwise) => document.querySelector(`input[name="${name}"]:checked`)?.value || otherwise;

  function pointsOf(gemm) {
    return (data.points[gemm] || []).map(([site, recipe, backend, error, low, high, speedup, slow, fast]) => ({
      site: data.names[site], index: site, recipe: word(recipe), backend: word(backend), error, low, high, limit: data.limits[gemm],
      at: Math.max(error, TINY), from: Math.max(low, TINY), to: Math.max(high, TINY),
      ...(speedup === undefined ? {} : { speedup, slow, fast }),
    }));
  }

  async function drawSites() {
    const element = byId("chart-sites");
    if (!element) return;
    const gemm = asked("gemm", "fprop");
    const values = pointsOf(gemm), note = byId("sites-note");
    note.textContent = "";
    if (!values.length) {
      views.get(element)?.finalize();
      element.replaceChildren();
      note.textContent = "Nothing was measured for this GEMM.";
      return;
    }
    if (values.some((row) => row.error < TINY)) note.textContent += ` Errors under ${TINY} are drawn at ${TINY}.`;
    await draw(element, { ...(data.charts.speeds || data.charts.sites), data: { values } }, values.length);
  }
  document.querySelectorAll('input[name="gemm"]').forEach((input) => input.addEventListener("change", drawSites));

  // A site's page. Details are stored in chunks, which are parsed when one of their sites is first opened.

  const chunks = new Map();
  async function detailsOf(index) {
    const number = Math.floor(index / data.chunk);
    if (!chunks.has(number)) {
      const element = byId(`chunk-${number}`);
      if (!element) return null;
      let text = element.textContent;
      if (element.dataset.packed) {
        const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
        text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
      }
      chunks.set(number, JSON.parse(text));
    }
    return chunks.get(number)[index - number * data.chunk];
  }

  const byName = new Map(data.names.map((name, index) => [name, index]));
  const number = (value, digits = 3) => (value === null || value === undefined ? "not measured" : Math.abs(value) > 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5) ? value.toExponential(2) : String(Number(value.toPrecision(digits))));
  const interval = (i) => (i ? `${number(i.value)} [${number(i.low)}, ${number(i.high)}]` : "not measured");
  const share = (value, digits = 1) => `${(100 * value).toFixed(digits)} %`;

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }
  function table(head, rows, numeric = []) {
    const cell = (tag, value, i) => make(tag, { ...(numeric.includes(i) ? { class: "n" } : {}), ...(tag === "th" ? { scope: "col" } : {}) }, value);
    const body = make("tbody");
    for (const row of rows) body.append(make("tr", row.here ? { class: "here" } : {}, ...row.cells.map((v, i) => cell("td", v, i))));
    return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": head.join(", ") }, make("table", {}, make("thead", {}, make("tr", {}, ...head.map((v, i) => cell("th", v, i)))), body));
  }
  const chip = (text) => make("span", { class: `chip ${{ safe: "good", fast: "good", chain: "good", unsafe: "bad", slow: "bad" }[text] || ""}` }, text);
  const dotted = (name) => name.split(/(?<=\.)/).flatMap((part) => [part, make("wbr")]); // may break after its dots
  const mono = (text) => make("span", { class: "mono" }, text);

  function histogramOf(stats, format) {
    const total = stats.elements - stats.non_finite || 1, counts = stats.histogram || [];
    const bins = counts.map((count, i) => ({ from: stats.histogram_first + i, to: stats.histogram_first + i + 1, share: count / total }));
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

  function titleOf(site, index) {
    const steps = make("span", {});
    for (const [label, to] of [["previous", index - 1], ["next", index + 1]]) {
      const button = make("button", { class: "step", type: "button" }, label);
      button.disabled = data.names[to] === undefined;
      button.addEventListener("click", () => openSite(data.names[to]));
      steps.append(button, " ");
    }
    const close = make("button", { class: "step", type: "button" }, "close");
    close.addEventListener("click", closeSite);
    steps.append(close);
    return make("div", { class: "title" }, make("h3", { tabindex: "-1" }, mono(site.name)), steps);
  }

  function factsOf(site) {
    const change = site.metric_change;
    const alone = change ? `; alone in FP8 it changes the loss by ${(100 * change.value).toFixed(3)} % [${(100 * change.low).toFixed(3)}, ${(100 * change.high).toFixed(3)}]` : "";
    return `${site.type}, M ${site.m} × K ${site.k} × N ${site.n}, ${site.calls} sampled calls, ${share(site.flops_share)} of the ${data.flopsOf} GEMM FLOPs${alone}`;
  }

  function verdictsOf(site) {
    return table(["GEMM", "error", "speed", "why", "runs", "would help"], (site.verdicts || []).map((v) => {
      const choice = (site.choices || []).find((c) => c.gemm === v.gemm);
      const runs = choice ? (choice.a ? mono(`${choice.a} @ ${choice.b}`) : "high precision") : "no plan";
      return { cells: [v.gemm, chip(v.safety), chip(v.speed), v.reason, runs, v.suggested_mod || "–"] };
    }));
  }

  function causesOf(site) {
    const rows = (site.verdicts || []).flatMap((v) => (v.causes || []).map((c) => ({ cells: [v.gemm, c.text, number(c.error), c.without === undefined ? "cannot be removed" : number(c.without), c.mod || "–"] })));
    if (!rows.length) return [];
    return [make("h3", {}, "Causes, tested"), make("p", { class: "facts" }, "The error, and the error with this one cause removed."), table(["GEMM", "cause", "error", "without it", "mod"], rows, [2, 3])];
  }

  function candidatesOf(site) {
    const all = site.candidates || [], seen = Object.keys(sources).filter((s) => all.some((c) => (c.errors || []).some((e) => e.source === s)));
    const timed = all.some((c) => c.microseconds);
    const head = ["GEMM", "recipe", "operands", "on", ...(seen.length ? seen.map((s) => `error, ${sources[s]}`) : ["error"]), "SQNR, dB", "underflow", ...(timed ? ["µs", "speed-up"] : [])];
    const rows = all.map((c) => {
      const here = (site.choices || []).some((x) => x.gemm === c.gemm && x.a === c.a && x.b === c.b);
      const pick = (e) => (c.gemm === "fprop" ? e.mere : e.relative_l2);
      const worst = (s) => c.distribution === s || c.distribution === sources[s];
      const errors = seen.length ? seen.map((s) => { const e = (c.errors || []).find((x) => x.source === s); const text = e ? interval(pick(e)) : "–"; return worst(s) && e ? make("b", {}, text) : text; }) : [interval(pick(c))];
      const measured = c.refusal ? [`refused: ${c.refusal}`, ...errors.slice(1).map(() => ""), "", ""] : [...errors, number(c.sqnr_db), c.underflowed === undefined ? "–" : share(c.underflowed, 2)];
      return { here, cells: [c.gemm, c.recipe, mono(`${c.a} @ ${c.b}`), c.backend, ...measured, ...(timed ? [c.microseconds ? interval(c.microseconds) : "not measured", interval(c.speedup)] : [])] };
    });
    return table(head, rows, [...Array(seen.length || 1).keys()].map((i) => i + 4).concat([4 + (seen.length || 1), 5 + (seen.length || 1)]));
  }

  function closeSite() {
    const page = byId("site-page");
    page.hidden = true;
    page.replaceChildren();
    delete page.dataset.site;
    history.replaceState(null, "", location.pathname + location.search);
    byId("plan-search")?.focus();
  }

  async function openSite(name, { move = true } = {}) {
    const index = byName.get(name), page = byId("site-page");
    const site = index === undefined || !page ? null : await detailsOf(index);
    if (!site) return;
    page.hidden = false;
    page.replaceChildren();
    page.append(titleOf(site, index), make("p", { class: "facts" }, factsOf(site)), verdictsOf(site), ...causesOf(site));
    page.append(make("h3", {}, "Distributions"), make("p", { class: "facts" }, "Magnitudes in powers of two. The bands are E4M3 with one scale for the whole tensor: finer scales move the bands with each row or block."));
    page.append(make("p", { class: "legend" }, ...["full precision", "losing bits", "becomes zero"].flatMap((band, i) => [make("span", { class: `swatch band${i}` }), make("span", {}, band)])));
    const operands = make("div", { class: "operands" }), drawings = [];
    page.append(operands);
    for (const stats of site.stats || []) {
      const chart = make("div", { class: "chart", role: "img", "aria-label": `Histogram of ${roles[stats.role]}` });
      operands.append(make("div", {}, make("h4", {}, roles[stats.role]),
        make("p", { class: "facts" }, `absmax ${number(stats.absmax)}, 99 % below ${number(stats.abs_p99)}, 99.9 % below ${number(stats.abs_p999)}, mean ${number(stats.mean)}, std ${number(stats.std)}, kurtosis ${number(stats.kurtosis)}, ${share(stats.zero_fraction)} zeros, ${stats.outlier_channels} outlier channels`), chart));
      const spec = histogramOf(stats, data.formats.find((f) => f.name === "e4m3") || data.formats[0]);
      if (spec) drawings.push(() => draw(chart, spec));
    }
    page.append(make("h3", {}, "Candidates"), candidatesOf(site));
    page.append(make("p", { class: "facts" }, (site.candidates || []).some((c) => c.microseconds) ? "MERE forward, relative L2 in gradients. Highlighted: what the plan runs. Bold: the distribution it is judged by." : "MERE forward, relative L2 in gradients; no speed was measured. Highlighted: what the plan runs. Bold: the distribution it is judged by."));
    if (move) {
      history.replaceState(null, "", `#site=${encodeURIComponent(name)}`);
      page.scrollIntoView({ block: "start" });
      page.querySelector("h3").focus({ preventScroll: true });
    }
    for (const job of drawings) await job();
    page.dataset.site = name;
  }
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("button[data-site]");
    if (button) openSite(button.dataset.site);
  });
  document.addEventListener("keydown", (event) => {
    const page = byId("site-page");
    if (event.key === "Escape" && page && !page.hidden) closeSite();
  });

  // The table of sites: all rows are filtered, one page of them is shown

  const PAGE = 100;
  const search = byId("plan-search"), kind = byId("plan-kind"), order = byId("plan-order"), count = byId("plan-count");
  const body = document.querySelector("#plan-table tbody"), pager = byId("plan-pager");
  const texts = [];
  let shown = data.table, page = 0;

  const converted = (row) => Boolean(row.h) || Boolean(row.c) && Object.values(row.c).some((choice) => choice[0] !== null);
  function textOf(row) {
    if (texts[row.i] === undefined) {
      const choices = Object.values(row.c || {}).flatMap((choice) => [word(choice[0]) || "high", word(choice[1]) || "", word(choice[2]), word(choice[3])]);
      const verdicts = Object.values(row.v || {}).flatMap((verdict) => verdict.map(word));
      texts[row.i] = [data.names[row.i], row.c ? (converted(row) ? "converted" : "kept") : "", row.h ? "chain" : "", row.u ? "unsafe" : "", ...choices, ...verdicts].join(" ").toLowerCase();
    }
    return texts[row.i];
  }

  function cellOf(row, gemm) {
    if (row.v) return row.v[gemm] ? make("span", {}, chip(word(row.v[gemm][0]))) : "–";
    const choice = row.c?.[gemm];
    if (!choice) return "–";
    if (row.h) return chip("chain");
    const [a, b] = [word(choice[0]), word(choice[1])];
    if (a === null) return "high";
    const facts = [choice[4] === null ? "" : `error ${number(choice[4])}`, choice[5] === null ? "" : `${choice[5].toFixed(2)}×`].filter(Boolean).join(", ");
    const operands = a === b ? [a] : [a, make("br"), b];
    return make("span", {}, make("span", { class: "mono" }, ...operands), make("br"), make("span", { class: "facts" }, facts));
  }

  function whyOf(row) {
    if (row.h) return "";
    const reasons = row.v ? gemms.map((g) => (row.v[g] && word(row.v[g][0]) !== "safe" ? word(row.v[g][2]) : null)) : gemms.map((g) => (row.c?.[g] && row.c[g][0] === null ? word(row.c[g][3]) : null));
    const told = [...new Set(reasons.filter(Boolean))];
    if (!told.length && row.c && !Object.keys(row.c).length) return "no GEMM was observed";
    return make("span", {}, ...told.flatMap((text, i) => (i ? [make("br"), text] : [text])));
  }

  function rowOf(row) {
    const name = data.names[row.i];
    const title = byId("site-page") ? make("button", { type: "button", class: "link mono", "data-site": name }, ...dotted(name)) : mono(name);
    const cells = [title, `${row.k} × ${row.n}`, share(row.f), ...gemms.map((g) => cellOf(row, g)), whyOf(row)];
    const classes = ["", "n", "n", "", "", "", "why"];
    return make("tr", {}, ...cells.map((cell, i) => make("td", classes[i] ? { class: classes[i] } : {}, cell)));
  }

  function showRows(all = false) {
    const pages = Math.max(1, Math.ceil(shown.length / PAGE));
    page = Math.min(Math.max(page, 0), pages - 1);
    const rows = all ? shown.slice(0, 2000) : shown.slice(page * PAGE, (page + 1) * PAGE);
    body.replaceChildren(...rows.map(rowOf));
    pager.hidden = pages < 2;
    byId("plan-page").textContent = `page ${page + 1} of ${pages}`;
    byId("plan-back").disabled = page === 0;
    byId("plan-next").disabled = page === pages - 1;
  }

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = { all: () => true, converted, kept: (row) => Boolean(row.c) && !converted(row), unsafe: (row) => Boolean(row.u) }[kind.value];
    shown = data.table.filter((row) => fits(row) && words.every((text) => textOf(row).includes(text)));
    if (order.value !== "model") shown.sort((x, y) => (order.value === "flops" ? y.f - x.f : y.e - x.e));
    page = 0;
    count.textContent = `${shown.length} of ${data.table.length} sites`;
    showRows();
  }
  if (search) {
    let waiting = 0;
    const soon = () => { clearTimeout(waiting); waiting = setTimeout(filter, data.table.length > 500 ? 80 : 0); };
    search.addEventListener("input", soon);
    kind.addEventListener("change", filter);
    order.addEventListener("change", filter);
    byId("plan-back").addEventListener("click", () => { page -= 1; showRows(); });
    byId("plan-next").addEventListener("click", () => { page += 1; showRows(); });
    if (!data.hasPlan) for (const option of [...kind.options]) if (["converted", "kept"].includes(option.value)) option.remove();
    filter();
  }

  // Draw at the start and when colors change, one chart at a time, so that the page stays responsive

  async function drawAll() {
    await drawSites();
    for (const [name, spec] of Object.entries(data.charts)) {
      const element = byId(`chart-${name}`);
      if (!element || name === "sites") continue;
      await draw(element, spec);
      await new Promise((done) => setTimeout(done));
    }
    const open = byId("site-page");
    if (open && !open.hidden) await openSite(open.dataset.site, { move: false });
    root.dataset.ready = "yes";
  }

  const switchTo = (scheme) => { setScheme(scheme); return drawAll(); };
  byId("scheme").addEventListener("click", () => switchTo(root.dataset.scheme === "dark" ? "light" : "dark"));
  dark.addEventListener("change", () => switchTo(dark.matches ? "dark" : "light"));
  let before = null;
  const folded = () => [...document.querySelectorAll("details")].filter((element) => !element.open);
  let opened = [];
  addEventListener("beforeprint", () => {
    before = root.dataset.scheme;
    opened = folded(); // folded details would be missing on paper
    opened.forEach((element) => { element.open = true; });
    setScheme("light");
    drawAll();
    if (body) showRows(true);
  });
  addEventListener("afterprint", () => {
    opened.forEach((element) => { element.open = false; });
    if (before) switchTo(before);
    if (body) showRows();
  });

  const wanted = decodeURIComponent((location.hash.match(/^#site=(.*)$/) || [])[1] || "");
  drawAll().then(() => wanted && openSite(wanted)).catch((error) => console.error(error));
})();

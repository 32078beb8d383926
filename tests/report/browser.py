"""A headless Chromium, driven without a driver: a script is put into a copy of the page, and the page it leaves is read back.

The script may use `check(name, value)` to report. Errors, unhandled rejections, `console.error` and everything the content security
policy had to stop are collected; so is every resource the page asked for.
"""

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--virtual-time-budget=60000",
)
COLLECT = """<script>
window.__report = { errors: [], blocked: [], values: {} };
addEventListener("error", (e) => __report.errors.push(String(e.message)));
addEventListener("unhandledrejection", (e) => __report.errors.push(String(e.reason)));
document.addEventListener("securitypolicyviolation", (e) => __report.blocked.push(e.blockedURI));
for (const level of ["error", "warn"]) {
  const old = console[level];
  console[level] = (...words) => { __report.errors.push(words.join(" ")); old(...words); };
}
</script>"""
ACT = """<script>
(async () => {
  const check = (name, value) => { __report.values[name] = value; };
  const wait = async (condition) => {
    for (let i = 0; i < 600 && !condition(); i++) await new Promise((done) => setTimeout(done, 50));
    if (!condition()) throw new Error(`waited in vain for ${condition}`);
  };
  try {
    await wait(() => document.documentElement.dataset.ready === "yes");
    @@
  } catch (error) { __report.errors.push(String(error)); }
  __report.resources = performance.getEntriesByType("resource").map((entry) => entry.name);
  const out = document.createElement("pre");
  out.id = "test-report";
  out.textContent = JSON.stringify(__report);
  document.body.append(out);
})();
</script>"""


def find_browser() -> str | None:
    """The first Chromium on the path."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def visit(page: str, script: str, *, width: int = 1200, dark: bool = False) -> dict[str, Any]:
    """Load the page, run the script when it is ready, and give back what was reported."""
    browser = find_browser()
    assert browser is not None
    head, end, tail = page.replace("<title>", COLLECT + "<title>", 1).rpartition("</body>")
    page = head + ACT.replace("@@", script) + end + tail
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(page, encoding="utf-8")
        scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
        command = [browser, *FLAGS, *scheme, f"--window-size={width},1000", f"--user-data-dir={folder}/profile"]
        done = subprocess.run(
            [*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=180, check=False
        )
    found = re.search(r'<pre id="test-report">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, f"the page reported nothing; the browser said: {done.stderr[-2000:]}"
    report: dict[str, Any] = json.loads(html.unescape(found[1]))
    return report

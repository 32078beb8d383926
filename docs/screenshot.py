"""The picture of a report in README and the manual: the top of the page in a headless Chromium.

python docs/screenshot.py runs/demo/report.html
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

OUT = Path(__file__).resolve().parent / "images" / "report.png"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def main() -> int:
    """Take it."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    browser = next((found for name in NAMES if (found := shutil.which(name))), None)
    if browser is None:
        print(f"none of {', '.join(NAMES)} is installed", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=30000"]
        place = [f"--user-data-dir={profile}", "--window-size=1180,1480", f"--screenshot={OUT}"]
        page = Path(sys.argv[1]).resolve().as_uri()
        done = subprocess.run([browser, *flags, *place, page], capture_output=True, timeout=180, check=False)
    print(OUT, OUT.stat().st_size, "bytes")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())

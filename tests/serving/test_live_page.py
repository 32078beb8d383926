"""The operator's page in a real browser, while traffic comes."""

import re
import shutil
import subprocess
import tempfile
import threading
import time

import pytest

from loka.serving import Server

from .client import get, post
from .sleeper import Sleeper

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason=f"NOT TESTED: the live page; none of {', '.join(NAMES)} is installed"),
]


def test_it_draws_latency_batches_and_shed_requests() -> None:
    pytest.importorskip("uvicorn")
    with Server(Sleeper({(1, 0): 0.02, (4, 0): 0.03}), sla=0.2, port=0, admin_port=0).background() as server:
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                post(server.url, {"number": 1})
                post(server.url, {"number": 1, "timeout_ms": 0.01})  # cannot be in time: shed

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(3)
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [
                    str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
                    "--virtual-time-budget=4000", f"--user-data-dir={folder}", "--dump-dom", f"{server.admin_url}/",
                ],
                capture_output=True, text=True, timeout=180, check=False,
            )  # fmt: skip
        stop.set()
        for thread in threads:
            thread.join()
        page = done.stdout
        assert 'data-ready="yes"' in page, done.stderr[-1000:]
        assert ">ready<" in page
        for name in ("p50", "p99", "answered", "shed", "batch"):
            found = re.search(rf'<polyline points="([^"]+)"[^>]*data-name="{name}"', page)
            assert found is not None, name
            assert len(found[1].split()) >= 2
        for name in ("latency", "traffic", "batches"):
            assert re.search(rf'id="{name}-scale">0 to [0-9.]+( ms)?, last two minutes<', page), name
        shed = re.search(r"<b>(\d+)</b>rejected, last 10 s", page)
        assert shed is not None
        assert int(shed[1]) > 0
        assert "sleeper" in page
        status, _ = get(server.admin_url or "", "/nothing")
        assert status == 404

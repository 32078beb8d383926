"""What is counted is bounded, parses, and is what the dashboard asks for."""

import json
import re
from importlib.resources import files

from loka.serving.telemetry import HELP, SECONDS, Telemetry


def test_everything_is_bounded() -> None:
    now = [0.0]
    telemetry = Telemetry(lambda: now[0])
    for n in range(3000):
        now[0] = n / 10
        for _ in range(20):
            telemetry.answered(0.01, late=False)
        telemetry.observe("loka_latency_seconds", 0.01, model="m")
    history = telemetry.history()
    assert len(history) == SECONDS
    assert history[-1]["age"] == 0
    assert history[-1]["p99"] == 10.0
    assert len(telemetry.render()) < 5000


def test_labels_are_escaped() -> None:
    telemetry = Telemetry()
    telemetry.count("loka_shed_total", model='a"b\\c\nd', reason="late")
    assert 'model="a\\"b\\\\c\\nd"' in telemetry.render()


def test_the_dashboard_asks_for_what_is_counted() -> None:
    board = json.loads((files("loka.serving") / "grafana.json").read_text())
    asked = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"loka_[a-z_]+", target["expr"])
    }
    assert asked
    assert asked <= set(HELP)

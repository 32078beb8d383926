"""What a probe costs a compiled Wukong training step: bf16 autocast, gradients on, the default cadence.

    python benchmarks/probe_overhead.py --out probe_overhead.json --seconds 300

Bars: at most 1 % of the step amortised (goal 0.5 %), at most 256 MB for the widest site. Two copies of the model are compiled, with and without a
probe, and their gradients compared. Then blocks of `every` steps of both take turns, each block waited for: the amortised overhead is the median of
the paired ratios, with the 95 % interval of a bootstrap. The parts (the second graph alone, a group's sampled step, learning after the step, a snapshot, a save)
are timed with CUDA events afterwards. Rows are written as they are measured; one that fails says why.
"""

import argparse
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from evidence import describe_run
from models_cases import SIZE, PlainWukong, build_on, compile_static, train_step

from loka.models import build as build_model
from loka.probe import Probe
from loka.probe.statistics import Statistics

KINDS = ("linear", "mixed", "batched", "grouped", "lookup")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300, help="stop measuring after this long")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--layout", choices=("loka", "plain"), default="loka", help="loka's Wukong (faster: a harder bar)"
    )
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument(
        "--stagger", type=int, default=None, help="groups of sites that take turns; default: the probe's"
    )
    parser.add_argument(
        "--all-kinds", action="store_true", help="probe mixes and batched products too, not only linears"
    )
    parser.add_argument("--rows", type=int, default=1024, help="rows of a look")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tiny", action="store_true", help="a small Wukong; to test the script on a CPU")
    parser.add_argument("--eager", action="store_true", help="do not compile; to test the script")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    for row in (
        bench.check_statistics,
        bench.build,
        bench.check_gradients,
        bench.check_waiting,
        bench.measure_rounds,
        bench.measure_parts,
        bench.measure_memory,
        bench.measure_snapshot,
    ):
        bench.run(row)
    print(json.dumps(bench.report, indent=1))
    return 1 if any("error" in part for part in bench.report.values() if isinstance(part, dict)) else 0


class Bench:
    """One run: the two models, the probe, and what has been measured."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.device = arguments, arguments.device
        self.deadline = time.monotonic() + arguments.seconds
        self.report: dict[str, Any] = {
            "environment": describe_run(self.device),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
            "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()},
        }

    def run(self, row: Callable[[], dict[str, Any]]) -> None:
        name = row.__name__
        red = [key for key in ("check_statistics", "build", "check_gradients") if "error" in self.report.get(key, ())]
        if red and not name.startswith("check"):
            self.report[name] = {"skipped": f"no timing after a red {red[0]}"}
        elif time.monotonic() > self.deadline:
            self.report[name] = {"skipped": "out of time"}
        else:
            start = time.perf_counter()
            try:
                self.report[name] = row()
            except Exception as error:
                traceback.print_exc()
                self.report[name] = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
            self.report[name]["took_s"] = round(time.perf_counter() - start, 1)
        print(f"{name}: {json.dumps(self.report[name])[:400]}", file=sys.stderr, flush=True)
        self.arguments.out.write_text(json.dumps(self.report, indent=1))

    # Correctness first

    def check_statistics(self) -> dict[str, Any]:
        """The same numbers on the device as on the CPU."""
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(1024, 640, generator=generator).sinh() * torch.logspace(-9, 3, 640)
        values[3, 4], values[5, 6], values[:, 7] = torch.nan, torch.inf, 0
        found = []
        for device in ("cpu", self.device):
            statistics_ = Statistics(640, torch.device(device))
            for part in values.split(500):
                statistics_.update(part.to(device))
            found.append(statistics_)
        here, there = found
        if not torch.equal(here.bins, there.bins):
            raise ValueError(f"histograms differ in {int((here.bins != there.bins).sum())} bins")
        torch.testing.assert_close(there.moments, here.moments, rtol=1e-4, atol=0.0)
        if not torch.equal(here.channel_absmax, there.channel_absmax.cpu()):
            raise ValueError("channel maxima differ")
        return {"ok": True}

    def build(self) -> dict[str, Any]:
        torch.set_float32_matmul_precision("high")
        self.bare_model, self.probed_model = self._make(), self._make()
        kinds = KINDS if self.arguments.all_kinds else ("linear",)
        before = self._memory()
        self.probe = Probe(
            self.probed_model,
            every=self.arguments.every,
            rows=self.arguments.rows,
            stagger=self.arguments.stagger,
            kinds=kinds,
            snapshot_every=10**9,
        )
        self.attached_bytes = self._memory() - before
        n, d = self._shape()
        x = torch.randn(self.arguments.batch, n, d, device=self.device, requires_grad=True)
        self.bare, self.probed = (self._step(model, x) for model in (self.bare_model, self.probed_model))
        start = time.perf_counter()
        self.bare()
        self._wait()
        bare = time.perf_counter() - start
        for on in (False, True):
            self._switch(on)
            self.probed()
        self._wait()
        return {
            "sites": len(self.probe.sites),
            "groups": len(self.probe._slots),
            "compile_bare_s": round(bare, 1),
            "compile_probed_s": round(time.perf_counter() - start - bare, 1),
        }

    def _make(self) -> nn.Module:
        torch.manual_seed(0)
        size = "small" if self.arguments.tiny else "plain"
        if self.arguments.tiny:
            model: nn.Module = build_model("wukong", size)
            return model.to(self.device)
        ours = build_on(self.device, "wukong", size)
        if self.arguments.layout == "loka":
            return ours
        with torch.device(self.device):
            return PlainWukong(ours)

    def _shape(self) -> tuple[int, int]:
        if not self.arguments.tiny:
            return SIZE["n"], SIZE["d"]
        from loka.models import configure

        config = configure("wukong", "small")
        return config.n, config.d

    def _step(self, model: nn.Module, x: Tensor) -> Callable[[], Any]:
        run = compile_static(model, not self.arguments.eager)
        leaves = [*model.parameters(), x]
        return train_step(lambda: run(x).float().square().mean(), leaves, self.device)

    def _switch(self, on: bool) -> None:
        """Force the probe's graph, with or without the sites themselves having their turn."""
        self.probe._switch.on = on

    def check_gradients(self) -> dict[str, Any]:
        """Of the bare model and of the probed one in both of its graphs: equal within the rounding of bf16."""
        n, d = self._shape()
        x = torch.randn(self.arguments.batch, n, d, device=self.device)
        found = {}
        for name, model, on in (
            ("bare", self.bare_model, False),
            ("unsampled", self.probed_model, False),
            ("sampled", self.probed_model, True),
        ):
            self._switch(on)
            leaf = x.clone().requires_grad_()
            run = compile_static(model, not self.arguments.eager)
            with torch.autocast(self.device, dtype=torch.bfloat16):
                loss = run(leaf).float().square().mean()
            loss.backward()
            found[name] = torch.cat([p.grad.flatten() for p in model.parameters()])
            model.zero_grad()
        self.probe.absorb()
        size = found["bare"].norm()
        errors = {name: float((found[name] - found["bare"]).norm() / size) for name in ("unsampled", "sampled")}
        if max(errors.values()) > 0.01:
            raise ValueError(f"gradients differ: {errors}")
        if not any(w.calls for w in self.probe._watches.values()):
            raise ValueError("the probe saw nothing: the graph with its ops was not used")
        return {
            "relative_l2_of_gradients": errors,
            "sites_seen": sum(w.calls > 0 for w in self.probe._watches.values()),
        }

    def check_waiting(self) -> dict[str, Any]:
        """A sampled step never waits for the GPU."""
        if self.device != "cuda":
            return {"skipped": "needs a GPU"}
        self._all_on()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.probed()
            self.probe.absorb()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return {"ok": True}

    # Time

    def measure_rounds(self) -> dict[str, Any]:
        """Blocks of `every` steps, bare and probed in turn."""
        ratios, bare_ms, probed_ms = [], [], []
        for number in range(-1, self.arguments.rounds):
            if number > 2 and time.monotonic() > self.deadline - 30:
                break
            order = (False, True) if number % 2 else (True, False)
            times = {probed: self._block(probed) for probed in order}
            if number >= 0:  # the first warms up
                bare_ms.append(times[False])
                probed_ms.append(times[True])
                ratios.append(times[True] / times[False] - 1)
        low, high = bootstrap(ratios)
        return {
            "rounds": len(ratios),
            "bare_step_ms": statistics.median(bare_ms),
            "probed_step_ms": statistics.median(probed_ms),
            "overhead_percent": 100 * statistics.median(ratios),
            "overhead_percent_95": [100 * low, 100 * high],
            "bar_1_percent": "met" if high <= 0.01 else "missed" if low > 0.01 else "undecided",
            "goal_half_percent": "met" if high <= 0.005 else "missed" if low > 0.005 else "undecided",
            "rounds_percent": [round(100 * r, 3) for r in ratios],
        }

    def _block(self, probed: bool) -> float:
        """Milliseconds a step."""
        self._wait()
        self.probe.steps = 0
        self.probe._schedule()
        start = time.perf_counter()
        for _ in range(self.arguments.every):
            if probed:
                self.probed()
                self.probe.step()
            else:
                self.bare()
        self._wait()
        return 1e3 * (time.perf_counter() - start) / self.arguments.every

    def measure_parts(self) -> dict[str, Any]:
        """Medians of single steps, in ms: the GPU's time, and how long the host took to ask for it."""

        def unsampled() -> None:
            self._switch(False)
            self.probed()

        def graph_alone() -> None:
            for watch in self.probe._watches.values():
                watch.on = False
            self._switch(True)
            self.probed()

        def sampled_all() -> None:
            self._all_on()
            self.probed()
            self.probe.absorb()

        parts: dict[str, Callable[[], None]] = {
            "bare": self.bare,
            "probed_unsampled": unsampled,
            "probed_graph_without_a_look": graph_alone,
            "probed_all_sites_at_once": sampled_all,
        }
        for number in range(len(self.probe._slots)):
            parts[f"probed_group_{number}"] = lambda number=number: self._group(number)  # type: ignore[misc]
        found = {name: self._time(part) for name, part in parts.items()}
        self.probe._schedule()
        return found

    def _group(self, number: int) -> None:
        for watch in self.probe._watches.values():
            watch.on = watch in self.probe._slots[number]
        self._switch(True)
        self.probed()
        self.probe.absorb()

    def _all_on(self) -> None:
        for watch in self.probe._watches.values():
            watch.on = True
        self._switch(True)

    def _time(self, part: Callable[[], None], repeats: int = 20) -> dict[str, float]:
        device_ms, host_ms = [], []
        for number in range(repeats + 3 if self.device == "cuda" else 3):
            self._wait()
            start = time.perf_counter()
            if self.device == "cuda":
                first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                first.record()
                part()
                last.record()
                host = 1e3 * (time.perf_counter() - start)
                last.synchronize()
                took = first.elapsed_time(last)
            else:
                part()
                took = host = 1e3 * (time.perf_counter() - start)
            if number >= (3 if self.device == "cuda" else 0):
                device_ms.append(took)
                host_ms.append(host)
        return {"ms": statistics.median(device_ms), "host_ms": statistics.median(host_ms)}

    # Memory, snapshots

    def measure_memory(self) -> dict[str, Any]:
        watches = [w for w in self.probe._watches.values() if w.learned is not None]
        widest = max(watches, key=lambda w: w.learned.bytes)
        peaks = {}
        for name, step in (("bare", self.bare), ("probed_sampled", self._sampled_once)):
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                step()
                self._wait()
                peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
        return {
            "widest_site": widest.name,
            "widest_site_mib": widest.learned.bytes / 2**20,
            "bar_256_mib": "met" if widest.learned.bytes <= 256 * 2**20 else "missed",
            "planned_total_mib": self.probe.ledger.spent / 2**20,
            "budget_mib": self.probe.ledger.budget / 2**20,
            "width_cap": self.probe.ledger.cap,
            "allocated_when_attached_mib": self.attached_bytes / 2**20,
            "peak_of_a_step_over_rest_mib": peaks,
            "covariances": sorted({w.covariance_kind for w in watches}),
        }

    def _sampled_once(self) -> None:
        self._all_on()
        self.probed()
        self.probe.absorb()

    def measure_snapshot(self) -> dict[str, Any]:
        """Flip-flop of every weight, and the part of a save that training waits for, each once in 10 000 steps."""
        times = []
        for _ in range(2):  # the second has factors to solve with, as all later ones have
            self._wait()
            start = time.perf_counter()
            for watch in self.probe._watches.values():
                watch.snapshot()
            self._wait()
            times.append(time.perf_counter() - start)
        start = time.perf_counter()
        state = self.probe.state_dict()
        copied = time.perf_counter() - start
        step = self.report["measure_rounds"].get("bare_step_ms")
        found = {
            "snapshots_of_all_s": times,
            "state_copied_s": copied,
            "state_mib": sum(v.numel() * v.element_size() for v in state.values()) / 2**20,
        }
        if step:
            found["overhead_percent_every_10000_steps"] = 100 * (times[-1] + copied) / (10_000 * step / 1e3)
        return found

    def _memory(self) -> int:
        return torch.cuda.memory_allocated() if self.device == "cuda" else 0

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def bootstrap(values: list[float], resamples: int = 2000) -> tuple[float, float]:
    """95 % interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]


if __name__ == "__main__":
    sys.exit(main())

"""The search of a generative model: selection of the best beams, and their attention to one context."""

# ruff: noqa: B023  (closures over a loop's variables are called before the loop moves on)

from collections.abc import Sequence
from typing import Any

from generative_kernels_plan import Plan, write
from generative_kernels_tiles import attend
from generative_kernels_timing import bar, fit, guarded, over

from loka.kernels import registry
from loka.measure.adapter import ADAPTERS
from loka.measure.conformance import Conformance
from loka.measure.timing import sets_needed

SELECT = [
    {"select_warps": 16}, {"select_warps": 32}, {"select_warps": 8}, {"maxima_block": 4096, "maxima_warps": 4},
    {"maxima_block": 16384, "maxima_warps": 16},
]  # fmt: skip


def section_topk(plan: Plan) -> None:
    """Selection: plain, and fused with log-softmax and mask."""
    adapter: Any = ADAPTERS["topk"]
    requests, beams, codes = plan.selection
    shapes = [(requests, beams * codes, plan.beams), (1, beams * codes, plan.beams)]
    names = [name for name in registry.BACKENDS["topk"] if plan.device.type == "cuda" or name != "triton"]
    for shape in shapes:
        for variant in ("float32", "bfloat16", f"float32|beams={beams}", f"bfloat16|beams={beams}|masked"):
            width = codes if "beams" in variant else beams * codes
            (call,) = adapter.calls([(shape[0], width, shape[2])], [variant])
            count = min(2, sets_needed(adapter.bytes_moved(call), plan.device))
            sets = [adapter.operands(call, seed=s, distribution="normal", device=plan.device) for s in range(count)]
            base = [adapter.baseline(call, o) for o in sets]
            ways: dict[str, Any] = {
                "torch.topk": (base, guarded(base[0], lambda _: adapter.check_baseline(call, sets[0])))
            }
            for name in names:
                if name == "reference" and plan.device.type == "cuda":
                    continue
                backend = registry.backend("topk", name)
                thunks = [adapter.thunk(backend, call, o) for o in sets]
                ways[name] = thunks, guarded(thunks[0], lambda _, b=backend: adapter.check(b, call, sets[0]))
            if plan.device.type == "cuda" and shape[0] > 1 and variant in ("float32", f"bfloat16|beams={beams}|masked"):
                ways |= tuned(adapter, call, sets)
            print(f"topk, {call}", flush=True)
            found = fit(plan, "topk", str(call), adapter.shape(call), ways, "torch.topk")
            if shape[0] == requests:
                bar(
                    plan,
                    f"topk {call} over torch",
                    over(found, plan.ours if plan.ours in found else names[0], "torch.topk"),
                    2.0,
                )
            write(plan)
            if plan.left < 8:
                return


def tuned(adapter: Any, call: Any, sets: Sequence[Any]) -> dict[str, Any]:
    """The same kernel under other launch options."""
    from loka.kernels.topk import triton_kernels

    backend = registry.backend("topk", "triton")
    ways = {}
    for options in SELECT:

        def run(o: Any, options: dict[str, int] = options) -> Any:
            before = dict(triton_kernels.LAUNCH)
            triton_kernels.LAUNCH.update(options)
            try:
                return adapter.thunk(backend, call, o)()
            finally:
                triton_kernels.LAUNCH.update(before)

        thunks = [lambda o=o, run=run: run(o) for o in sets]
        name = "triton " + ", ".join(f"{key} {value}" for key, value in options.items())
        ways[name] = thunks, guarded(thunks[0], lambda _: Conformance(True, 0.0, 0.0))
    return ways


def section_attention(plan: Plan) -> None:
    """Beams over a shared context: SDPA without and with a mask, ours with every tile."""
    adapter: Any = ADAPTERS["beam_attention"]
    for requests, context in plan.attention:
        for variant in (
            f"{plan.heads}/{plan.heads}x{plan.head}|shared",
            f"{plan.heads}/{plan.heads}x{plan.head}|shared|ragged",
        ):
            ragged = variant.endswith("ragged")
            if ragged and context < 3000 and plan.device.type == "cuda":
                continue
            (call,) = adapter.calls([(requests, plan.beams, context)], [variant])
            sets = [adapter.operands(call, seed=s, distribution="normal", device=plan.device) for s in range(2)]
            base = [adapter.baseline(call, o) for o in sets]
            ways: dict[str, Any] = {"SDPA": (base, guarded(base[0], lambda _: adapter.check_baseline(call, sets[0])))}
            for name in ("torch", "reference") if plan.device.type != "cuda" else ("torch", "triton"):
                backend = registry.backend("beam_attention", name)
                thunks = [adapter.thunk(backend, call, o) for o in sets]
                ways[name] = thunks, guarded(thunks[0], lambda _, b=backend: adapter.check(b, call, sets[0]))
            if not ragged:
                for tile, reason in plan.green.get("attention", {}).items():
                    if not reason:
                        thunks = [lambda o=o, tile=tile: attend(o, tile) for o in sets]
                        ways[f"triton {tile}"] = thunks, guarded(thunks[0], lambda _: Conformance(True, 0.0, 0.0))
            print(f"beam attention, {call}", flush=True)
            fit(plan, "beam_attention", str(call), adapter.shape(call), ways, "SDPA")
            write(plan)
            if plan.left < 8:
                return

"""Every combination of safe and fast, on the worse end of the interval, with the reason."""

from typing import Any

import pytest

from loka.probe.verdict import Allowed, judge
from loka.records import Candidate, Cause, Gemm, GemmVerdict, Interval


def around(value: float, width: float = 0.0) -> Interval:
    return Interval(value=value, low=value - width, high=value + width)


def candidate(gemm: Gemm = "fprop", recipe: str = "rowwise", error: float | None = 0.1, **more: Any) -> Candidate:
    interval = None if error is None else around(error, more.pop("width", 0.0))
    return Candidate(
        gemm=gemm,
        recipe=recipe,
        backend=more.pop("backend", "reference"),
        a="e4m3:row",
        b="e4m3:row",
        mere=interval,
        relative_l2=interval,
        distribution=None if error is None else "copula",
        **more,
    )


def verdict(*candidates: Candidate, gemm: Gemm = "fprop", units: int = 1, **more: Any) -> GemmVerdict:
    allowed = Allowed(margin=0.0002, units=units, error=0.2)
    return judge(gemm, candidates, [], allowed=allowed, min_speedup=1.05, outputs=more.pop("outputs", 64), **more)


def test_the_upper_end_of_the_harm_decides() -> None:
    assert verdict(candidate(harm=around(0.00015))).safety == "safe"
    assert verdict(candidate(harm=around(0.00015, 0.0001))).safety == "unsafe"


def test_a_large_error_that_does_no_harm_is_safe_and_a_small_one_that_does_is_not() -> None:
    assert verdict(candidate(error=0.5, harm=around(0.00001))).safety == "safe"
    assert verdict(candidate(error=0.001, harm=around(0.01))).safety == "unsafe"


def test_units_share_the_margin_in_squares() -> None:
    harm = around(0.00015)
    assert verdict(candidate(harm=harm), units=1).safety == "safe"
    many = verdict(candidate(harm=harm), units=4)
    assert many.safety == "unsafe"
    assert "allowed 0.01%" in many.reason


def test_without_a_harm_nothing_is_called_safe() -> None:
    """A small error of a product is not evidence about the loss; a large one is still a reason to refuse."""
    found = verdict(candidate(error=0.19), unscored="no gradient was seen")
    assert found.safety == "not measured"
    assert "MERE 0.19" in found.reason
    assert "no gradient was seen" in found.reason
    assert verdict(candidate(error=0.19, width=0.02)).safety == "unsafe"


def test_a_chain_does_not_speak_for_a_linear_alone() -> None:
    chain = candidate(recipe="static", error=None, harm=around(0.0))
    assert verdict(chain, candidate(harm=around(0.01))).safety == "unsafe"


def test_the_lower_end_of_the_speed_up_decides() -> None:
    assert verdict(candidate(speedup=around(1.2, 0.1))).speed == "fast"
    assert verdict(candidate(speedup=around(1.2, 0.2))).speed == "slow"
    assert verdict(candidate()).speed == "not measured"


def test_only_safe_candidates_can_be_fast() -> None:
    fast_but_wrong = candidate(recipe="tensorwise", harm=around(0.01), speedup=around(2.0))
    slow_but_right = candidate(harm=around(0.0), speedup=around(0.9))
    found = verdict(fast_but_wrong, slow_but_right)
    assert (found.safety, found.speed) == ("safe", "slow")
    assert "0.90x" in found.reason


def test_the_reason_of_a_safe_one_says_where_it_was_measured_and_what_else_would_do() -> None:
    low, lower = around(0.0001), around(0.00005)
    found = verdict(candidate(harm=lower), candidate(recipe="blockwise", harm=low))
    assert "rowwise: may change the loss by 0.005%, at most 0.005%" in found.reason
    assert "also within it: blockwise; MERE 0.1 [0.1, 0.1] on the copula" in found.reason
    unscored = verdict(candidate(), candidate(recipe="blockwise", error=0.15))
    assert "rowwise: MERE 0.1 [0.1, 0.1] on the copula, limit 0.2; also under it: blockwise" in unscored.reason
    assert "relative L2" in verdict(candidate("dgrad"), gemm="dgrad").reason


def test_an_unsafe_one_is_explained_by_tested_causes() -> None:
    cause = Cause(text="3 outlier channels in the input", error=0.5, without=0.1, mod="block_norm: normalise")
    asked = []

    def explain(best: Candidate) -> list[Cause]:
        asked.append(best.recipe)
        return [cause]

    found = verdict(candidate(error=0.5), candidate(recipe="blockwise", error=0.4, underflowed=0.3), explain=explain)
    assert asked == ["blockwise"]
    assert "3 outlier channels in the input: 0.5 with it, 0.1 without" in found.reason
    assert "30% of an operand underflows" in found.reason
    assert found.suggested_mod == "block_norm: normalise"
    assert found.causes == [cause]
    unexplained = verdict(candidate(error=0.5), explain=lambda best: [])
    assert "none of the tested causes" in unexplained.reason


def test_a_safe_one_is_not_asked_for_causes() -> None:
    def explain(best: Candidate) -> list[Cause]:
        raise AssertionError

    assert verdict(candidate(harm=around(0.0)), explain=explain).causes == []


def test_a_prediction_layer_is_protected() -> None:
    mod = verdict(candidate(error=0.5), outputs=1).suggested_mod
    assert mod is not None
    assert mod.startswith("protect_intermediates")


def test_a_slow_one_says_where_the_time_goes() -> None:
    why = "K = 256: quantization (9.0 us) costs more than the GEMM saves (3.0 us)"
    found = verdict(candidate(speedup=around(0.8)), explain_slow=lambda fastest: why)
    assert found.speed == "slow"
    assert why in found.reason
    assert found.suggested_mod is not None
    assert found.suggested_mod.startswith("fuse")


def test_refusals_are_collected_and_misaligned_shapes_have_a_mod() -> None:
    refused = candidate(error=None, refusal="K must be a multiple of 16, got 13")
    found = verdict(refused)
    assert (found.safety, found.speed) == ("not measured", "not measured")
    assert "multiple of 16" in found.reason
    assert found.suggested_mod is not None
    assert found.suggested_mod.startswith("align_shapes")
    assert verdict().reason == "no candidate was evaluated"


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_real_backend_is_named(backend: str) -> None:
    reason = verdict(candidate(backend=backend)).reason
    assert ("on torch" in reason) == (backend == "torch")

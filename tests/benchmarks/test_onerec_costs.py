"""What a generation costs by its shapes, and what a kernel's name says of it."""

import pytest

from loka.models import configure

from .scripts import script

count_costs, classify_kernel = script("onerec_costs").count_costs, script("onerec_costs").classify_kernel


def test_costs_of_the_published_model() -> None:
    config = configure("onerec", "4b-a0.5b")
    costs = {c.operator: c for c in count_costs(config, requests=8, context=512, beams=512)}
    tokens = 8 * (1 + 512 + 512)
    linears = tokens * 14 * 2 * 6 * 1408**2
    assert costs["attention linears"].flops == pytest.approx(linears)
    assert costs["experts"].flops == pytest.approx(tokens * 12 * 4 * 2 * 3 * 1408**2)
    low = {
        c.operator: c for c in count_costs(config, requests=8, context=512, beams=512, linear_bytes=1, expert_bytes=1)
    }
    assert low["experts"].flops == costs["experts"].flops
    assert 0.5 <= low["experts"].bytes / costs["experts"].bytes < 0.75
    assert low["experts"].intensity > costs["experts"].intensity


def test_kernel_names() -> None:
    assert classify_kernel("sm90_xmma_gemm_bf16bf16_bf16f32") == "linears and heads"
    assert classify_kernel("_grouped_gemm_kernel") == "experts"
    assert classify_kernel("_grouped_swiglu") == "experts"
    assert classify_kernel("_attend") == "attention"
    assert classify_kernel("_select") == "softmax and selection"
    assert classify_kernel("_ZN7cutlass13device_kernel...GemmUniversalINS5_17GroupProblemShapeIN4cute") == "experts"
    assert classify_kernel("triton_red_fused__fused_rms_norm__to_copy_add_0") == "norms, activations, quantisation"
    assert classify_kernel("something unheard of") == "other"

import pytest
import torch

from loka.training.precision import autocast, check_precision, precision_scope, resolve_device

CPU = torch.device("cpu")


def test_auto_device_is_what_the_machine_has():
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_missing_gpu_is_an_error_and_not_a_cpu_run():
    with pytest.raises(ValueError, match="no CUDA GPU"):
        resolve_device("cuda")


def test_tf32_on_a_cpu_is_refused():
    with pytest.raises(ValueError, match="tf32"):
        check_precision("tf32", CPU)


def test_fp32_means_fp32_and_the_callers_mode_comes_back():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with precision_scope("fp32", CPU):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_bf16_runs_matmuls_in_bfloat16_on_float32_weights():
    layer = torch.nn.Linear(4, 4)
    with autocast("bf16", CPU):
        assert layer(torch.ones(2, 4)).dtype == torch.bfloat16
    with autocast("fp32", CPU):
        assert layer(torch.ones(2, 4)).dtype == torch.float32
    assert layer.weight.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_tf32_changes_the_products_and_fp32_does_not():
    a, b = torch.randn(256, 256, device="cuda"), torch.randn(256, 256, device="cuda")
    exact = a.double() @ b.double()
    errors = {}
    for name in ("fp32", "tf32"):
        with precision_scope(name, a.device):
            errors[name] = float((a @ b - exact).abs().max())
    assert errors["tf32"] > 10 * errors["fp32"]


def test_a_device_that_is_none_is_no_internal_error():
    with pytest.raises(ValueError, match=r"device 'abacus': .*; expected auto, cpu or cuda"):
        resolve_device("abacus")

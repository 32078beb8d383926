"""Recipes: what each GEMM quantises, and what sets them apart from torchao's of the same name."""

import pytest

from loka.dispatch import recipe as recipe_module
from loka.dispatch.recipe import RECIPES, USUAL, recipe_named
from loka.records import GEMMS


def test_recipes_are_e4m3_throughout_and_say_what_stays_high() -> None:
    for name in USUAL:
        recipe = RECIPES[name]
        kept = [gemm for gemm in GEMMS if recipe.operands(gemm) is None]
        assert kept == (["wgrad"] if name == "rowwise_with_gw_hp" else [])
        specs = {str(spec) for gemm in GEMMS if (o := recipe.operands(gemm)) is not None for spec in (o.a, o.b)}
        assert all(spec.startswith("e4m3:") for spec in specs)
    with pytest.raises(ValueError, match="no recipe 'axiswise'; recipes are tensorwise"):
        recipe_named("axiswise")


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_torchaos_recipes_differ_as_the_docstring_says(name: str) -> None:
    float8 = pytest.importorskip("torchao.float8")
    theirs = float8.Float8LinearConfig.from_recipe_name(name)
    assert recipe_module.__doc__ is not None
    assert "E5M2 under tensorwise" in recipe_module.__doc__
    assert str(theirs.cast_config_grad_output.target_dtype).endswith("e5m2" if name == "tensorwise" else "e4m3fn")
    assert theirs.round_scales_to_power_of_2 == (name != "tensorwise")
    fast = [theirs.gemm_config_output, theirs.gemm_config_grad_input, theirs.gemm_config_grad_weight]
    assert [gemm.use_fast_accum for gemm in fast] == [True, False, False]
    for gemm in GEMMS:
        operands = RECIPES[name].operands(gemm)
        assert operands is None or operands.fast_accum == (gemm != "wgrad")  # sums over the batch are long

"""One spelling: what prints parses back, and what cannot be meant is refused with a reason."""

import copy
import pickle
from dataclasses import FrozenInstanceError
from itertools import permutations
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka.formats import COL, E4M3, FORMATS, ROW, TENSOR, WHOLE, Block, Spec
from loka.formats.format import Rounding
from loka.formats.spec import ScaleMode, ScaleType

extents = st.one_of(st.just(WHOLE), st.integers(1, 999_999_999))
blocks = st.builds(Block, extents, extents)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    block = draw(blocks)
    scale = draw(st.sampled_from([s for s in get_args(ScaleType) if s != "e4m3" or block != TENSOR]))
    mode = "dynamic" if scale == "e4m3" else draw(st.sampled_from(get_args(ScaleMode)))
    rounding = draw(st.sampled_from(get_args(Rounding)))
    return Spec(draw(st.sampled_from(list(FORMATS.values()))), block, scale, mode, rounding)


@given(specs())
def test_a_spec_prints_and_parses(spec: Spec) -> None:
    assert Spec.parse(str(spec)) == spec
    assert str(Spec.parse(str(spec))) == str(spec)
    assert hash(Spec.parse(str(spec))) == hash(spec)


@given(specs())
def test_parts_may_come_in_any_order_and_defaults_may_be_said(spec: Spec) -> None:
    for options in permutations([spec.scale, spec.mode, spec.rounding]):
        assert Spec.parse(":".join([spec.format.name, str(spec.block), *options])) == spec
    assert Spec.parse(f"  {spec}\n") == spec


@given(specs())
def test_transposing_twice_changes_nothing(spec: Spec) -> None:
    assert spec.transposed.transposed == spec
    assert spec.transposed.block == Block(spec.block.cols, spec.block.rows)


@given(specs())
def test_copies_are_equal(spec: Spec) -> None:
    assert copy.deepcopy(spec) == pickle.loads(pickle.dumps(spec)) == spec


@given(blocks)
def test_a_block_prints_and_parses(block: Block) -> None:
    assert Block.parse(str(block)) == block


WORDS = [*FORMATS, "tensor", "row", "1x128", "*x1", "0x3", "", "pow2", "e8m0", "f32", "static", "stochastic", "dynamic"]


@given(st.one_of(st.text(max_size=20), st.lists(st.sampled_from(WORDS), max_size=5).map(":".join)))
def test_any_text_is_a_spec_or_a_value_error(text: str) -> None:
    for parse in (Spec.parse, Block.parse):
        try:
            parsed = parse(text)
        except ValueError as error:
            assert "spec" in str(error) or "block" in str(error) or "scale type" in str(error)  # noqa: PT017
        else:
            assert parse(str(parsed)) == parsed


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("e4m3:tensor", Spec(E4M3)),
        ("e4m3:row", Spec(E4M3, ROW)),
        ("e4m3:col", Spec(E4M3, COL)),
        ("e4m3:1x*", Spec(E4M3, ROW)),
        ("e4m3:*x*", Spec(E4M3, TENSOR)),
        ("e4m3:1x128", Spec(E4M3, Block(1, 128))),
        ("e4m3:*x128", Spec(E4M3, Block(WHOLE, 128))),
        ("e5m2:tensor:delayed", Spec(FORMATS["e5m2"], mode="delayed")),
        ("e2m1:1x16:e4m3", Spec(FORMATS["e2m1"], Block(1, 16), "e4m3")),
        ("int8:row:static:stochastic", Spec(FORMATS["int8"], ROW, mode="static", rounding="stochastic")),
    ],
)
def test_documented_spellings(text: str, spec: Spec) -> None:
    assert Spec.parse(text) == spec


@pytest.mark.parametrize("name", ["tensor", "row", "col"])
def test_named_blocks_print_their_name(name: str) -> None:
    assert str(Block.parse(name)) == name
    assert str(Spec(E4M3, Block.parse(name))) == f"e4m3:{name}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"spec '' is not FORMAT:BLOCK\[:...\] with FORMAT in e4m3, e5m2, e2m1, int8, int4; e.g. e4m3:1x128"),
        ("e4m3", r"spec 'e4m3' is not FORMAT:BLOCK"),
        ("fp8:row", r"spec 'fp8:row' is not FORMAT:BLOCK"),
        ("E4M3:row", r"spec 'E4M3:row' is not FORMAT:BLOCK"),
        ("e4m3:", r"block '' is not tensor, row, col or ROWSxCOLS \(e.g. 1x128, 128x128, \*x1\)"),
        ("e4m3:rows", r"block 'rows' is not tensor, row, col"),
        ("e4m3:1x", r"block '1x' is not tensor, row, col"),
        ("e4m3:-1x4", r"block '-1x4' is not tensor, row, col"),
        ("e4m3:1x128x1", r"block '1x128x1' is not"),
        ("e4m3:1 x 128", r"block '1 x 128' is not"),
        ("e4m3:٣x4", r"block '٣x4' is not"),
        ("e4m3:1x9999999999", r"block '1x9999999999' is not"),
        ("e4m3:0x4", r"a block extent is a positive integer or \* \(whole\), got 0 x 4"),
        (
            "e4m3:row:fast",
            r"spec 'e4m3:row:fast': 'fast' is not one of f32, pow2, e8m0, e4m3, dynamic, static, delayed",
        ),
        ("e4m3:row:", r"spec 'e4m3:row:': '' is not one of"),
        ("e4m3:row:static:delayed", r"spec 'e4m3:row:static:delayed': 'static' and 'delayed' both set the mode"),
        ("e4m3:row:f32:f32", r"'f32' and 'f32' both set the scale"),
        ("e4m3:row:nearest:stochastic", r"'nearest' and 'stochastic' both set the rounding"),
        ("e2m1:tensor:e4m3", r"scale type e4m3 is the block half of a two-level scale; hint: use a block"),
        ("e2m1:1x16:e4m3:static", r"scale type e4m3 supports only dynamic scales, got static"),
    ],
)
def test_rejections_say_what_was_seen_and_expected(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spec.parse(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": "f16"}, r"Spec.scale must be one of f32, pow2, e8m0, e4m3, got 'f16'"),
        ({"mode": "online"}, r"Spec.mode must be one of dynamic, static, delayed, got 'online'"),
        ({"rounding": "up"}, r"Spec.rounding must be one of nearest, stochastic, got 'up'"),
        ({"block": "row"}, r"Spec takes a Format and a Block, got .* and 'row'; hint: Spec.parse"),
        ({"format": "e4m3"}, r"Spec takes a Format and a Block, got 'e4m3'"),
    ],
)
def test_construction_validates(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spec(**{"format": E4M3, **arguments})


@pytest.mark.parametrize("extents", [(0, 1), (1, 0), (-2, 1), (1.5, 1), (True, 1), ("1", 1)])
def test_a_block_has_positive_integer_extents(extents: tuple) -> None:
    with pytest.raises(ValueError, match="a block extent is a positive integer"):
        Block(*extents)


def test_specs_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Spec(E4M3).mode = "static"

import pytest

from loka.data import Field, Schema, SequenceField


def test_a_valid_schema() -> None:
    schema = Schema(("x",), (Field("item", 5),), (SequenceField("history", 5, 10, "item"),), ("click",))
    assert schema.field("item").cardinality == 5
    with pytest.raises(ValueError, match=r"no categorical field 'user'.*item"):
        schema.field("user")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((("x",), (Field("x", 2),), (), ("y",)), "unique.*'x'"),
        (((), (Field("x", 2),), (), ()), "at least one label"),
        (((), (Field("x", 2),), (SequenceField("h", 2, 5, "z"),), ("y",)), "shares 'z'"),
        (((), (Field("x", 2),), (SequenceField("h", 3, 5, "x"),), ("y",)), "cardinality 3.*has 2"),
    ],
)
def test_invalid_schemas_say_why(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schema(*arguments)


def test_fields_are_validated() -> None:
    with pytest.raises(ValueError, match="cardinality"):
        Field("x", 0)
    with pytest.raises(ValueError, match="max_length"):
        SequenceField("x", 2, 0)

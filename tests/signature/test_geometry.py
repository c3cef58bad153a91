import pytest

from eldr.signature.geometry import GeometryError, ModelGeometry


def geometry(**changes) -> ModelGeometry:
    fields = {"moe_layers": (1, 3), "experts": 8, "top_k": 2, "fingerprint": "f"}
    return ModelGeometry(**{**fields, **changes})


def test_shape_is_layers_by_experts():
    assert geometry().shape == (2, 8)
    assert geometry().layers == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_layers": ()}, "moe_layers must be ascending and not empty"),
        ({"moe_layers": (3, 1)}, "moe_layers must be ascending"),
        ({"moe_layers": (1, 1)}, "moe_layers must be ascending"),
        ({"moe_layers": (-1, 1)}, "must not be negative, got -1"),
        ({"experts": 0}, "experts must be at least 1, got 0"),
        ({"top_k": 0}, "top_k must be 1 to 8, got 0"),
        ({"top_k": 9}, "top_k must be 1 to 8, got 9"),
        ({"fingerprint": ""}, "fingerprint must not be empty"),
    ],
)
def test_a_field_out_of_range_is_named_with_its_value(changes, message):
    with pytest.raises(GeometryError, match=message):
        geometry(**changes)


@pytest.mark.parametrize(
    ("field", "value"), [("fingerprint", "g"), ("moe_layers", (1, 2)), ("experts", 9), ("top_k", 3)]
)
def test_a_difference_is_told_with_both_values(field, value):
    with pytest.raises(GeometryError) as caught:
        geometry().require_same(geometry(**{field: value}), "the router", "worker d0")
    assert str(caught.value) == (
        f"{field} differs: the router has {getattr(geometry(), field)}, worker d0 has {value}"
    )


def test_equal_geometries_pass():
    geometry().require_same(geometry(), "a", "b")

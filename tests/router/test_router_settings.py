import pytest

from eldr.router.counters import Counters
from eldr.router.settings import RouterSettings


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reservation_ttl_s": 0.0}, "reservation_ttl_s must be above 0, got 0"),
        ({"prefill_ttl_s": float("inf")}, "prefill_ttl_s must be above 0, got inf"),
        ({"min_coverage": 1.5}, "min_coverage must be 0 to 1, got 1.5"),
        ({"seed": -1}, "seed must be 0 to"),
        ({"report_period_s": 9.0}, r"report_period_s must be below stale_s \(5\), got 9"),
        ({"workers": ("localhost",)}, "workers must be host:port, got 'localhost'"),
        ({"workers": ("localhost:0",)}, "workers must be host:port"),
    ],
)
def test_settings_out_of_range_name_field_value_and_range(changes, says):
    with pytest.raises(ValueError, match=says):
        RouterSettings(**changes)


def test_counters_are_read_by_name_and_label():
    counters = Counters()
    counters.add("eldr_x_total", policy="jsq")
    counters.add("eldr_x_total", 2, policy="p2c")
    assert counters.value("eldr_x_total", policy="jsq") == 1
    assert counters.value("eldr_x_total") == 0
    assert counters.total("eldr_x_total") == 3
    assert counters.snapshot() == {
        ("eldr_x_total", (("policy", "jsq"),)): 1,
        ("eldr_x_total", (("policy", "p2c"),)): 2,
    }
    with pytest.raises(ValueError, match="start with eldr_"):
        counters.add("x_total")

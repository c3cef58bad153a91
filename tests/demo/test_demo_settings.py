"""Settings of the demo are checked by name."""

import pytest

from eldr.demo.settings import DemoSettings, SettingsError


def test_in_flight_follows_the_decoders_unless_it_is_set():
    assert DemoSettings(decode=3).concurrency == 72
    assert DemoSettings(decode=3, in_flight=10).concurrency == 10


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prefill", 0),
        ("decode", 0),
        ("rounds", 0),
        ("rounds_limit_s", 0),
        ("requests", 0),
        ("in_flight", -1),
        ("output_tokens", 1),
        ("prompt_tokens", 0),
        ("calibration", 19),
        ("width", -1),
        ("seed", -1),
        ("policies", ()),
        ("policies", ("jsq", "jsq")),
        ("policies", ("jqs",)),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(SettingsError, match=field):
        DemoSettings(**{field: value})

"""The arithmetic of integration/bench/ablations.py."""

import dataclasses

import pytest

from eldr.routing.registry import POLICIES
from eldr.simulator.measures import Figures
from eldr.simulator.scenario import ORACLE, Scenario, parse_policy, scenario_of
from integration.bench.ablations import VARIANTS, Variant, merged, rows_of


def figures(p50: float, p99: float) -> Figures:
    return Figures(1, 0, 0, 0, p50, p99, p99, 1.0, 50.0, 1.0, share_error=0.2)


def test_a_variant_is_compared_with_its_own_base_seed_by_seed() -> None:
    base, other = Variant("a", "a", "a"), Variant("b", "b", "a", "part")
    found = {
        ("steady", "a", 0): figures(10.0, 20.0),
        ("steady", "a", 1): figures(20.0, 40.0),
        ("steady", "b", 0): figures(9.0, 21.0),
        ("steady", "b", 1): figures(18.0, 42.0),
    }
    (row,) = rows_of(found, [base, other], ["steady"], range(2))
    assert (row.variant, row.base, row.group) == ("b", "a", "part")
    assert row.tpot_p50_vs_base == pytest.approx(-10)
    assert row.p50_ci == pytest.approx((-10, -10))
    assert row.tpot_p99_vs_base == pytest.approx(5)
    assert row.share_error == pytest.approx(0.2)


def test_settings_are_merged_into_those_of_the_scenario() -> None:
    raw = {"name": "x", "fleet": {"decode": 4, "slow": 1}}
    assert merged(raw, {"fleet": {"decode": 8}, "rate": 2}) == {
        "name": "x",
        "fleet": {"decode": 8, "slow": 1},
        "rate": 2,
    }
    assert raw["fleet"] == {"decode": 4, "slow": 1}


def test_every_variant_has_a_name_of_its_own_and_settings_that_exist() -> None:
    names = [variant.name for variant in VARIANTS]
    assert len(set(names)) == len(names)
    for variant in VARIANTS:
        assert variant.base in names
        name, options = parse_policy(variant.policy)
        assert name == ORACLE or set(options) <= set(POLICIES[name].options)
        made = scenario_of(merged({"name": "x", "mix": {"a": 1}}, variant.scenario))
        plain = scenario_of({"name": "x", "mix": {"a": 1}})
        different = [
            f.name for f in dataclasses.fields(Scenario) if getattr(made, f.name) != getattr(plain, f.name)
        ]
        assert bool(different) == bool(variant.scenario)

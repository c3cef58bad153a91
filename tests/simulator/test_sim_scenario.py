from pathlib import Path

import pytest
from small_worlds import tiny

from eldr.simulator.scenario import ScenarioError, load_scenario, parse_policy
from eldr.simulator.step_time import MODELS

SUITE = Path(__file__).parents[2] / "integration" / "scenarios"


@pytest.mark.parametrize("path", sorted(SUITE.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_scenario_of_the_suite_loads(path):
    assert load_scenario(path).name == path.stem


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rat": 1}, "the scenario: unknown 'rat'; did you mean 'rate'?"),
        ({"fleet": {"decoed": 4}}, "fleet: unknown 'decoed'; did you mean 'decode'?"),
        ({"fleet": {"step_time": "testbad"}}, "fleet.step_time: unknown 'testbad'; did you mean 'testbed'?"),
        ({"world": {"shape": {"layres": 2}}}, "world.shape: unknown 'layres'; did you mean 'layers'?"),
        ({"policies": ["union-cots"]}, "policies: unknown 'union-cots'; did you mean 'union-cost'?"),
        ({"rate": 0}, "rate must be 0.001 to 100000, got 0"),
        ({"rate": "fast"}, "rate must be a number, got 'fast'"),
        ({"warmup_s": 6}, "warmup_s must be 0 to 5.95, got 6"),
        ({"mix": {"a": -1}}, "mix.a must be a weight of at least 0, got -1"),
        ({"fleet": {"report_loss": 1}}, "fleet.report_loss must be 0 to below 1, got 1"),
        ({"fleet": {"slow": 17}}, "fleet.slow must be 0 to 16, got 17"),
        ({"fleet": {"max_num_seqs": 0}}, "fleet.max_num_seqs must be at least 1, got 0"),
        ({"output": {"tokens": 0}}, "output.tokens must be at least 1, got 0"),
        ({"fleet": 3}, "fleet must be a mapping, got 3"),
    ],
)
def test_a_wrong_scenario_names_the_key_and_what_is_allowed(changes, message):
    with pytest.raises(ScenarioError) as error:
        tiny(**changes)
    assert message in str(error.value)


def test_what_is_no_mapping_is_refused(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("- a\n")
    with pytest.raises(ScenarioError, match=r"bad\.yaml must be a mapping"):
        load_scenario(path)
    path.write_text("a: [\n")
    with pytest.raises(ScenarioError, match=r"bad\.yaml is no YAML"):
        load_scenario(path)


def test_step_time_is_a_name_or_its_numbers():
    assert tiny(fleet={"step_time": "testbed"}).fleet.step_time == MODELS["testbed"]
    own = {"base_ms": 1, "per_request_ms": 2, "per_expert_ms": 3, "factors": [[8, 1.5]]}
    assert tiny(fleet={"step_time": own}).fleet.step_time.factors == ((8, 1.5),)


def test_policy_options_are_numbers():
    assert parse_policy("union-cost:power=8,guard=0.05") == ("union-cost", {"power": 8.0, "guard": 0.05})
    with pytest.raises(ScenarioError, match="options are name=number, got 'tau'"):
        parse_policy("locality-band:tau")

"""Replayed arrivals: what is read, and what is refused with the line and the reason."""

import pytest
from small_worlds import tiny

from eldr.simulator.arrivals_file import ArrivalsError, load_arrivals
from eldr.simulator.runs import requests_of, world_of
from eldr.simulator.scenario import ScenarioError, load_scenario, scenario_of


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "0.5\n1\n1\n2.25\n"),
        ("a.csv", "id,seconds\na,0.5\nb,1\nc,1.0\n\nd,2.25\n"),
        ("a.jsonl", '0.5\n{"seconds": 1, "id": 3}\n\n1\n2.25\n'),
    ],
)
def test_csv_and_json_lines_give_the_same_times(tmp_path, name, text):
    assert load_arrivals(written(tmp_path, name, text)) == (0.5, 1.0, 1.0, 2.25)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.csv", "", "a.csv has no arrivals"),
        ("a.csv", "seconds\n", "a.csv has no arrivals"),
        ("a.jsonl", "\n\n", "a.jsonl has no arrivals"),
        ("a.csv", "1\n3\n2\n", "line 3: arrivals must ascend; 2 comes after 3"),
        ("a.csv", "-1\n", "line 1: seconds must be finite and not negative, got -1"),
        ("a.csv", "1\nnan\n", "line 2: seconds must be finite and not negative, got nan"),
        ("a.jsonl", "1\nInfinity\n", "line 2: seconds must be finite and not negative"),
        ("a.jsonl", "1" + "0" * 400, "line 1: seconds must be a number"),
        ("a.csv", "1\nsoon\n", "line 2: seconds must be a number, got 'soon'"),
        ("a.jsonl", "true\n", "line 1: seconds must be a number, got True"),
        ("a.jsonl", '{"time": 1}\n', "line 1: the key 'seconds' is missing"),
        ("a.jsonl", "1\n{\n", "line 2: no JSON"),
        ("a.csv", "1,2\n", "line 1: several columns and none is headed 'seconds'"),
        ("a.csv", "id,seconds\na\n", "line 2: the column 'seconds' is missing"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_line_and_reason(tmp_path, name, text, reason):
    with pytest.raises(ArrivalsError, match=reason):
        load_arrivals(written(tmp_path, name, text))


def test_a_scenario_replays_the_file_beside_it_until_its_end(tmp_path):
    written(tmp_path, "times.csv", "0\n1.5\n4\n5.5\n9\n")
    path = written(
        tmp_path,
        "s.yaml",
        "name: s\nmix: {a: 1}\nduration_s: 6\nwarmup_s: 1\ncalibration_requests: 20\narrivals: times.csv\n"
        "world: {shape: {layers: 2, experts: 8, top_k: 2}}\n",
    )
    scenario = load_scenario(path)
    for seed in (0, 1):
        drawn = requests_of(scenario, world_of(scenario, tmp_path), seed)
        assert [arrival.at_s for arrival in drawn.arrivals] == [0.0, 1.5, 4.0, 5.5]


@pytest.mark.parametrize(
    ("arrivals", "reason"),
    [
        ([2.0, 1.0], "arrivals, entry 2: arrivals must ascend"),
        ([], "arrivals has no arrivals"),
        ([7.0], "arrivals: the first comes at 7 s, after duration_s 6"),
        (3, "arrivals must be a file name or a list of seconds, got 3"),
        ("times.csv", "arrivals: a file is read only beside a scenario file"),
    ],
)
def test_a_scenario_refuses_arrivals_that_it_cannot_replay(arrivals, reason):
    with pytest.raises(ScenarioError, match=reason):
        tiny(arrivals=arrivals)


def test_arrivals_and_bursts_exclude_each_other():
    with pytest.raises(ScenarioError, match="arrivals and bursts"):
        tiny(arrivals=[1.0], bursts={})


def test_a_missing_file_is_named(tmp_path):
    path = written(tmp_path, "s.yaml", "name: s\nmix: {a: 1}\narrivals: gone.csv\n")
    with pytest.raises(ScenarioError, match=r"gone\.csv"):
        load_scenario(path)


def test_times_may_stand_in_plain_data():
    assert scenario_of({"name": "s", "mix": {"a": 1}, "arrivals": [0, 2]}).arrivals == (0.0, 2.0)

"""`eldr simulate` on a small fleet."""

import json
from pathlib import Path

from click.testing import CliRunner

from eldr.cli.simulate import command

SMALL = """
name: small
mix: {a: 1, b: 1}
rate: 20
duration_s: 4
warmup_s: 1
output: {tokens: 20}
fleet: {prefill: 1, decode: 2}
world: {shape: {layers: 2, experts: 16, top_k: 2}}
calibration_requests: 40
policies: [jsq, union-cost]
"""


def test_a_scenario_ends_in_a_table_and_in_json(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    done = CliRunner().invoke(
        command, [str(path), "--seeds", "2", "--jobs", "1", "--json", f"{tmp_path}/out"]
    )
    assert done.exit_code == 0, done.output
    assert "union-cost" in done.output
    runs = json.loads((tmp_path / "out").read_text())["runs"]
    assert [(run["policy"], run["seed"]) for run in runs] == [
        ("jsq", 0),
        ("jsq", 1),
        ("union-cost", 0),
        ("union-cost", 1),
    ]
    assert all(run["figures"]["unfinished"] == 0 for run in runs)


def test_pictures_are_drawn_where_asked(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    done = CliRunner().invoke(
        command, [str(path), "--seeds", "1", "--jobs", "1", "--plots", f"{tmp_path}/plots"]
    )
    assert done.exit_code == 0, done.output
    assert sorted(path.stem for path in (tmp_path / "plots").glob("*.png")) == [
        "experts",
        "load-skew",
        "tpot",
        "tpot-distribution",
    ]


def test_several_rates_make_a_table_each_and_pictures_over_the_rates(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    arguments = [str(path), "--rates", "20,10", "--seeds", "1", "--jobs", "1"]
    done = CliRunner().invoke(
        command, [*arguments, "--json", f"{tmp_path}/out", "--plots", f"{tmp_path}/plots"]
    )
    assert done.exit_code == 0, done.output
    assert "small, 10 requests/s" in done.output
    assert "small, 20 requests/s" in done.output
    cells = json.loads((tmp_path / "out").read_text())["rates"]
    assert [(cell["rate"], len(cell["runs"])) for cell in cells] == [(10.0, 2), (20.0, 2)]
    drawn = sorted(str(path.relative_to(tmp_path / "plots")) for path in tmp_path.rglob("*.png"))
    assert len(drawn) == 10
    assert {"tpot-by-rate.png", "experts-by-rate.png", "10/tpot.png", "20/load-skew.png"} <= set(drawn)


def test_rates_are_refused_beside_one_rate_and_where_they_are_no_numbers(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    for arguments, message in (
        (["--rate", "5", "--rates", "5,6"], "exclude each other"),
        (["--rates", "5,fast"], "numbers with commas"),
    ):
        done = CliRunner().invoke(command, [str(path), *arguments])
        assert done.exit_code == 2
        assert message in done.output


def test_an_unknown_key_is_named_with_a_suggestion(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL + "durations_s: 3\n")
    done = CliRunner().invoke(command, [str(path)])
    assert done.exit_code == 1
    assert "unknown 'durations_s'; did you mean 'duration_s'" in done.output


def test_an_unknown_policy_option_ends_with_its_message(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    done = CliRunner().invoke(command, [str(path), "--jobs", "1", "--policy", "union-cost:powr=3"])
    assert done.exit_code == 1
    assert "powr" in done.output


def test_policies_and_rate_of_the_command_line_win(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    arguments = [str(path), "--policy", "p2c", "--rate", "10", "--seeds", "1", "--jobs", "1"]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    assert "10 requests/s" in done.output
    assert "p2c" in done.output
    assert "union-cost" not in done.output


def test_a_missing_counts_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text("name: x\nmix: {a: 1}\nworld: {counts: none.npz}\n")
    done = CliRunner().invoke(command, [str(path)])
    assert done.exit_code == 1
    assert "none.npz does not exist" in done.output.replace("\n", " ")


def test_a_rate_for_replayed_arrivals_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL + "arrivals: [0.5, 2]\n")
    done = CliRunner().invoke(command, [str(path), "--rate", "5"])
    assert done.exit_code == 1
    assert "small.yaml replays arrivals" in done.output

import pytest
from click.testing import CliRunner

from eldr.cli.main import cli


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--policy", "jqs"], "did you mean 'jsq'"),
        (["--policy", "locality-band"], "needs a profile"),
        (["--policy-option", "power=99"], "power must be 0 to 32, got 99"),
        (["--policy-option", "power"], "must be KEY=NUMBER"),
        (["--stale-s", "0"], "stale_s must be above 0"),
        (["--report-period-s", "7"], "report_period_s must be below stale_s"),
        (["--worker", "localhost"], "workers must be host:port, got 'localhost'"),
        (["--min-coverage", "2"], "min_coverage must be 0 to 1, got 2"),
        (["--profile", "nowhere"], "does not exist"),
    ],
)
def test_a_wrong_setting_ends_with_its_name(words, says):
    ended = CliRunner().invoke(cli, ["router", *words])
    assert ended.exit_code == 2
    assert says in ended.output


def test_a_file_that_is_no_profile_is_named(tmp_path):
    path = tmp_path / "profile"
    path.write_bytes(b"no profile")
    ended = CliRunner().invoke(cli, ["router", "--profile", str(path)])
    assert ended.exit_code == 2
    assert str(path) in ended.output


def test_a_name_that_cannot_be_discovered_is_refused():
    ended = CliRunner().invoke(cli, ["router", "--discover", "workers:9000"])
    assert ended.exit_code == 2
    assert "discover must be dns:///NAME:PORT, got 'workers:9000'" in ended.output


def test_the_dead_are_not_forgotten_before_they_are_dead():
    ended = CliRunner().invoke(cli, ["router", "--forget-s", "10"])
    assert ended.exit_code == 2
    assert "forget_s must be at least dead_s (30), got 10" in ended.output

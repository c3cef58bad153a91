"""`eldr demo`: a real cluster on this machine, compared under several policies."""

import json
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.console import Console

from eldr.calibration.counts import CountsError
from eldr.calibration.fit import FitError
from eldr.cli.main import effective
from eldr.client import CallError
from eldr.cluster import ClusterError, ConfigError
from eldr.demo.conductor import Demo, DemoError
from eldr.demo.outcome import Outcome
from eldr.demo.references import ReferenceRunError
from eldr.demo.settings import DEFAULT_POLICIES, DemoSettings, SettingsError
from eldr.demo.source_tree import SourceTreeError, find_source_tree
from eldr.demo.stages import Stages
from eldr.demo.workload import WorkloadError
from eldr.recording import PromptsError, RecordError

EXIT_INTERRUPTED = 130
TABLE_WIDTH = 120
"""Columns where the output is no terminal."""

FAILURES = (
    CallError,
    ClusterError,
    ConfigError,
    CountsError,
    DemoError,
    FitError,
    OSError,
    PromptsError,
    RecordError,
    ReferenceRunError,
    SourceTreeError,
    WorkloadError,
)


@click.command(name="demo")
@click.option("--prefill", type=int, default=1, show_default=True, help="Prefill servers.")
@click.option("--decode", type=int, default=4, show_default=True, help="Decode servers.")
@click.option("--rounds", type=int, default=3, show_default=True, help="Timed rounds of every policy.")
@click.option(
    "--rounds-limit",
    "rounds_limit_s",
    type=int,
    default=540,
    show_default=True,
    metavar="SECONDS",
    help="Begin no round that would end later than this after the first one began.",
)
@click.option("--requests", type=int, default=234, show_default=True, help="Requests per policy and round.")
@click.option(
    "--in-flight",
    type=int,
    default=0,
    show_default=True,
    help="Requests at the same time; 0 takes 24 per decode server.",
)
@click.option("--output-tokens", type=int, default=64, show_default=True, help="Tokens of every answer.")
@click.option(
    "--prompt-tokens", type=int, default=97, show_default=True, help="Prompts are cut to their last tokens."
)
@click.option("--calibration", type=int, default=208, show_default=True, help="Prompts to calibrate with.")
@click.option(
    "--width",
    type=int,
    default=1024,
    show_default=True,
    help="Width of every expert, padded with zeros so that decode is bound by expert weights; 0 pads nothing.",
)
@click.option(
    "--policies",
    default=",".join(DEFAULT_POLICIES),
    show_default=True,
    help="Policies to compare, separated by commas.",
)
@click.option(
    "--seed", type=int, default=1, show_default=True, help="Seed of the workload and of all sampling."
)
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the result here too."
)
@click.option(
    "--work-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for model, logs, counts and profile.  [default: a temporary one]",
)
@click.option("--keep", is_flag=True, help="Keep the temporary work folder.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    policies: str,
    json_path: Path | None,
    work_dir: Path | None,
    keep: bool,
    **options: Any,
) -> None:
    """Start prefill and decode servers, calibrate, fit, and compare policies on the same requests.

    Everything is real: vLLM with the eldr connector, KV over NIXL, a trained mixture-of-experts model in
    float32, the router and the gateway. Outputs are compared with those of one ordinary vLLM server, and
    signatures with Hugging Face's counts. Ends with status 1 where a request failed or a comparison did not
    hold.
    """
    console = Console(width=None if Console().is_terminal else TABLE_WIDTH)
    for name, value in effective(ctx).items():
        console.print(f"{name} = {value}", style="dim", markup=False, highlight=False)
    try:
        settings = DemoSettings(policies=tuple(policies.replace(" ", "").split(",")), **options)
    except SettingsError as error:
        raise click.UsageError(str(error)) from error
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise click.UsageError(f"--json: there is no folder {json_path.absolute().parent}")
    try:
        with _interruptible(), _work_folder(work_dir, keep, console) as folder:
            outcome = Demo(settings, find_source_tree(), folder, Stages(console)).run()
    except FAILURES as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        console.print("interrupted; every process was stopped", markup=False)
        ctx.exit(EXIT_INTERRUPTED)
    _report(outcome, console, json_path)
    if not outcome.passed:
        ctx.exit(1)


def _report(outcome: Outcome, console: Console, json_path: Path | None) -> None:
    console.print(outcome.as_table())
    if json_path is not None:
        json_path.write_text(json.dumps(outcome.as_json(), indent=2) + "\n", encoding="utf-8")
        console.print(f"wrote {json_path}", markup=False, highlight=False)


@contextmanager
def _work_folder(chosen: Path | None, keep: bool, console: Console) -> Iterator[Path]:
    """The chosen folder, or a temporary one that goes unless it is to be kept or a failure is to be read."""
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        yield chosen
        return
    folder = Path(tempfile.mkdtemp(prefix="eldr-demo-"))
    try:
        yield folder
    except FAILURES:
        keep = True
        raise
    finally:
        if keep:
            console.print(f"kept {folder}", markup=False, highlight=False)
        else:
            shutil.rmtree(folder)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Makes the first SIGINT, SIGTERM or SIGHUP a KeyboardInterrupt and ignores the rest.

    A second Ctrl-C, or the one that tox sends after the terminal's, must not cut the stopping of the servers
    short.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

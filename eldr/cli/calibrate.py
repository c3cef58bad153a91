"""`eldr calibrate`: a prompts file in, the engines' own expert counts out."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from eldr.calibration.counts import Counts
from eldr.calibration.counts_file import save_counts
from eldr.cli.main import effective
from eldr.client import RouterError
from eldr.recording import (
    Prompt,
    PromptsError,
    RecordError,
    RecordSettings,
    Targets,
    prompts_sha256,
    read_prompts,
    record,
    refuse_overlap,
)
from eldr.recording.discovery import targets_of_router, targets_of_workers
from eldr.recording.offline import offline_engine, record_offline
from eldr.recording.partial import PartialFile

DEFAULT_ROUTER = "127.0.0.1:7700"
UNBOUND = ("in_flight", "timeout_s")
"""Settings that an interrupted run may change, since they change no count."""


@dataclass(frozen=True, slots=True)
class Workers:
    """Where the live workers are: those of a router, or of both legs by name."""

    router: str | None
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    model: str | None

    async def targets(self) -> Targets:
        """Raises RecordError and RouterError."""
        if self.prefill:
            return await targets_of_workers(self.prefill, self.decode, self.model)
        return await targets_of_router(self.router or DEFAULT_ROUTER, self.model)


@dataclass(frozen=True, slots=True)
class Offline:
    """An engine in this process. `arguments` go to vLLM."""

    model: str
    gate: bool
    arguments: Mapping[str, Any]


def _arguments(_ctx: click.Context, _param: click.Parameter, pairs: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise click.BadParameter(f"must be NAME=VALUE, such as max_model_len=4096, got {pair!r}")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


@click.command(name="calibrate")
@click.argument(
    "prompts_path", metavar="PROMPTS", type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="Counts file (npz) to write; an old one is replaced in one step.",
)
@click.option(
    "--router", envvar="ELDR_ROUTER", help=f"Take the workers of this router.  [default: {DEFAULT_ROUTER}]"
)
@click.option(
    "--prefill",
    multiple=True,
    metavar="HOST:PORT",
    help="gRPC address (or HTTP URL) of a prefill worker, instead of a router's. Repeatable.",
)
@click.option(
    "--decode",
    multiple=True,
    metavar="HOST:PORT",
    help="gRPC address (or HTTP URL) of a decode worker, instead of a router's. Repeatable.",
)
@click.option(
    "--model", help="Served model name.  [default: the one that the workers serve, where it is one]"
)
@click.option(
    "--offline", metavar="MODEL", help="No workers: run this model with vLLM in this process, both legs."
)
@click.option("--gate", is_flag=True, help="Sums of gate probabilities and logits too; only with --offline.")
@click.option(
    "--engine-arg",
    "arguments",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_arguments,
    help="Argument of vLLM's LLM, value as JSON or text; only with --offline. Repeatable.",
)
@click.option(
    "--held-out",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Prompts that shall judge the result; the run is refused where PROMPTS holds one of them.",
)
@click.option("--restart", is_flag=True, help="Forget what an interrupted run has finished.")
@click.option("--limit", type=click.IntRange(min=1), help="Take only the first prompts of the file.")
@click.option(
    "--output-tokens", type=int, default=64, show_default=True, help="Tokens to generate per prompt."
)
@click.option("--temperature", type=float, default=0.8, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True, help="Prompt number i samples with seed + i.")
@click.option("--in-flight", type=int, default=32, show_default=True, help="Requests at the same time.")
@click.option("--prompt-tokens", type=int, help="Keep at most this many tokens of a prompt, the last ones.")
@click.option(
    "--ignore-eos/--stop-at-eos", default=True, show_default=True, help="Go on after the model's end token."
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    prompts_path: Path,
    out: Path,
    router: str | None,
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    model: str | None,
    offline: str | None,
    gate: bool,
    arguments: dict[str, Any],
    held_out: Path | None,
    restart: bool,
    limit: int | None,
    **options: Any,
) -> None:
    """Run PROMPTS through prefill and decode and keep the expert counts of both.

    PROMPTS is a .jsonl file of {"text", "id"?, "domain"?} or a text file with one prompt a line. The workers are those
    of a running router, or named ones, or none: --offline runs the model here. The result goes into `eldr fit`.

    What is finished is kept beside --out as OUT.partial until all is done; the same command goes on from there.
    """
    console = Console(stderr=True)
    for name, value in effective(ctx).items():
        console.print(f"{name} = {value}", style="dim", markup=False, highlight=False)
    if bool(prefill) != bool(decode) or (router and prefill):
        raise click.UsageError("give --router, or both --prefill and --decode")
    if offline is None and (gate or arguments):
        raise click.UsageError("--gate and --engine-arg go with --offline: served engines report counts only")
    if offline is not None and (prefill or model):
        raise click.UsageError("--offline runs no workers: leave out --prefill, --decode and --model")
    partial_path = out.with_name(out.name + ".partial")
    try:
        settings = RecordSettings(**options)
        prompts = read_prompts(prompts_path)[:limit]
        if held_out is not None:
            refuse_overlap(prompts, read_prompts(held_out))
        if restart:
            partial_path.unlink(missing_ok=True)
        place = (
            Workers(router, prefill, decode, model) if offline is None else Offline(offline, gate, arguments)
        )
        counts = _record(prompts, place, settings, partial_path, console)
        save_counts(counts, out)
        partial_path.unlink(missing_ok=True)
    except (PromptsError, RecordError, RouterError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        kept = (
            "the same command goes on from"
            if partial_path.exists()
            else "nothing was finished, so there is no"
        )
        raise click.ClickException(f"interrupted; {kept} {partial_path}") from None
    _report(counts)
    click.echo(
        f"wrote {out}: {counts.requests} requests, {int(counts.prompt_len.sum())} prompt tokens, "
        f"{int(counts.decode_tokens.sum())} decode tokens, fingerprint {counts.fingerprint}"
    )


def _record(
    prompts: list[Prompt], place: Workers | Offline, settings: RecordSettings, path: Path, console: Console
) -> Counts:
    """Raises RecordError, RouterError, ValueError and OSError."""
    targets = asyncio.run(place.targets()) if isinstance(place, Workers) else None
    bound: dict[str, Any] = {"prompts_sha256": prompts_sha256(prompts)}
    if isinstance(place, Offline):
        bound |= {"offline": place.model, "gate": place.gate, "engine_args": dict(place.arguments)}
    elif targets is not None:
        bound |= {"model": targets.model}
    names = (name for name in settings.__slots__ if name not in UNBOUND)
    with ExitStack() as stack:
        partial = stack.enter_context(
            PartialFile(path, bound | {name: getattr(settings, name) for name in names})
        )
        if partial.rows:
            console.print(
                f"{len(partial.rows)} of {len(prompts)} requests are finished in {path}", markup=False
            )
        if partial.damaged_lines:
            console.print(f"{partial.damaged_lines} lines of it were cut or damaged and are run again")
        if isinstance(place, Offline):
            engine = offline_engine(
                place.model, in_flight=settings.in_flight, gate=place.gate, arguments=place.arguments
            )
            stack.callback(engine.close)
            done = stack.enter_context(_bar(len(prompts), console))
            return record_offline(
                prompts, engine, settings, gate=place.gate, done=done, finished=partial.rows, keep=partial.add
            )
        assert targets is not None
        done = stack.enter_context(_bar(len(prompts), console))
        return asyncio.run(record(prompts, targets, settings, done, partial.rows, partial.add))


@contextmanager
def _bar(total: int, console: Console) -> Iterator[Callable[[int], None]]:
    """A progress bar; gives the function that moves it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("prompts", total=total)
        yield lambda count: progress.update(task, completed=count)


def _report(counts: Counts) -> None:
    """Requests and tokens per domain, where prompts are labelled."""
    if not any(counts.domains):
        return
    table = Table(box=SIMPLE)
    table.add_column("domain", no_wrap=True)
    for heading in ("requests", "prompt tokens", "decode tokens"):
        table.add_column(heading, justify="right")
    decoded = counts.decode_tokens
    for domain in sorted(set(counts.domains)):
        rows = [row for row, label in enumerate(counts.domains) if label == domain]
        table.add_row(
            domain or "(none)",
            str(len(rows)),
            str(int(counts.prompt_len[rows].sum())),
            str(int(decoded[rows].sum())),
        )
    Console().print(table)

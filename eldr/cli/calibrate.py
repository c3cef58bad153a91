"""`eldr calibrate`: a prompts file in, the engines' own expert counts out."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eldr.calibration.counts import Counts
from eldr.calibration.counts_file import save_counts
from eldr.cli.main import effective
from eldr.client import RouterClient, RouterError, WorkerHealth, WorkerRole
from eldr.recording import Prompt, PromptsError, RecordError, RecordSettings, Targets, read_prompts, record

DEFAULT_ROUTER = "127.0.0.1:7700"


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
@click.option("--prefill", multiple=True, help="URL of a prefill worker, instead of a router's. Repeatable.")
@click.option("--decode", multiple=True, help="URL of a decode worker, instead of a router's. Repeatable.")
@click.option("--model", help="Served model name.  [default: the one that the prefill worker serves]")
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
    limit: int | None,
    **options: Any,
) -> None:
    """Run PROMPTS through live prefill and decode workers and keep what their engines counted.

    PROMPTS is a .jsonl file of {"text", "id"?, "domain"?} or a text file with one prompt a line. The result
    goes into `eldr fit`.
    """
    console = Console(stderr=True)
    for name, value in effective(ctx).items():
        console.print(f"{name} = {value}", style="dim", markup=False, highlight=False)
    if bool(prefill) != bool(decode) or (router and prefill):
        raise click.UsageError("give --router, or both --prefill and --decode")
    try:
        settings = RecordSettings(**options)
        prompts = read_prompts(prompts_path)[:limit]
        counts = asyncio.run(_run(prompts, router, prefill, decode, model, settings, console))
        save_counts(counts, out)
    except (PromptsError, RecordError, RouterError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        raise click.ClickException("interrupted; nothing was written") from None
    click.echo(
        f"wrote {out}: {counts.requests} requests, {int(counts.prompt_len.sum())} prompt tokens, "
        f"{int(counts.decode_tokens.sum())} decode tokens, fingerprint {counts.fingerprint}"
    )


async def _run(
    prompts: list[Prompt],
    router: str | None,
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    model: str | None,
    settings: RecordSettings,
    console: Console,
) -> Counts:
    if prefill:
        targets = Targets(prefill, decode, model or await _served_model(prefill[0]))
    else:
        targets = await _workers_of(router or DEFAULT_ROUTER, model)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("prompts", total=len(prompts))
        return await record(prompts, targets, settings, lambda count: bar.update(task, completed=count))


async def _workers_of(address: str, model: str | None) -> Targets:
    """The live workers of a router. Raises RecordError where a leg has none or they serve several models."""
    async with RouterClient(address) as client:
        workers = [worker for worker in await client.workers() if worker.health is WorkerHealth.LIVE]
    workers = [worker for worker in workers if model in (None, worker.info.served_model)]
    urls = {
        role: tuple(worker.info.http_url for worker in workers if worker.info.role is role)
        for role in WorkerRole
    }
    for role, found in urls.items():
        if not found:
            raise RecordError(
                f"router {address} has no live {role} worker" + (f" of {model!r}" if model else "")
            )
    models = sorted({worker.info.served_model for worker in workers})
    if len(models) > 1:
        raise RecordError(f"router {address} has workers of {', '.join(models)}; choose with --model")
    geometry = workers[0].info.geometry
    return Targets(urls[WorkerRole.PREFILL], urls[WorkerRole.DECODE], models[0], geometry.moe_layers)


async def _served_model(url: str) -> str:
    """The first model that a worker serves. Raises RecordError where it does not say."""
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(url.rstrip("/") + "/v1/models") as response,
        ):
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, ValueError, LookupError) as error:
        raise RecordError(f"prefill worker {url} does not name its model ({error}); give --model") from error

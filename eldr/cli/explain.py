"""`eldr explain`: every decoder's score for one prompt, with the reasons."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import click
from rich.table import Table

from eldr.cli.calls import ask, console, number
from eldr.cli.options import router_option
from eldr.cli.security_options import caller
from eldr.client import CodecError, Decision, Outcome, RouterClient, WorkerClient, WorkerError

HANDOFF = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
    "eldr_signature": True,
}

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What the prefill leg gave; the signature is None where the worker could not tell."""

    signature: str | None
    prompt_tokens: int


@click.command(name="explain")
@router_option
@click.option("--prompt-file", type=FILE, help="Prompt to run through a prefill worker for its signature.")
@click.option("--signature-file", type=FILE, help="Text of kv_transfer_params['eldr_signature'] instead.")
@click.option("--policy", default="", help="Ask another policy than the one in force.")
@click.option("--model", default="", help="Served model name.  [default: the prefill worker's]")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0.1),
    default=120.0,
    show_default=True,
    help="For the prefill leg.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    router: str,
    prompt_file: Path | None,
    signature_file: Path | None,
    policy: str,
    model: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Score every decoder for a prompt, with reasons. Books nothing and generates nothing.

    The prompt is prefilled by a real prefill worker; its KV blocks are given back at once.
    """
    if (prompt_file is None) == (signature_file is None):
        raise click.UsageError("give either --prompt-file or --signature-file")

    path = prompt_file or signature_file
    assert path is not None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{path}: {error}") from error

    async def work(client: RouterClient) -> Decision:
        if prompt_file is not None:
            prefilled = await _prefill(client, text, model, timeout_s)
        else:
            prefilled = Prefilled(text.strip(), 0)
        try:
            return await client.explain_decode(
                model=model,
                signature=prefilled.signature,
                prompt_tokens=prefilled.prompt_tokens,
                policy=policy,
            )
        except CodecError as error:
            raise click.ClickException(f"{path}: {error}") from error

    decision = ask(router, work)
    if as_json:
        click.echo(json.dumps(_object(decision), indent=2))
    else:
        _show(decision)


async def _prefill(client: RouterClient, prompt: str, model: str, timeout_s: float) -> Prefilled:
    booking = await client.select_prefill(model=model, prompt_prefix=prompt.encode()[:1024])
    outcome = Outcome.WORKER_ERROR
    try:
        if not model:
            served = {status.info.worker_id: status.info.served_model for status in await client.workers()}
            model = served.get(booking.worker.worker_id, "")
        answer = await _post(booking.worker.http_url, prompt, model, timeout_s)
        outcome = Outcome.COMPLETED
    finally:
        await client.release_prefill(booking.reservation_id, outcome)
    params = answer.get("kv_transfer_params") or {}
    if transfer_id := params.get("remote_request_id"):
        await _give_back(booking.worker.grpc_address, str(transfer_id))
    return Prefilled(params.get("eldr_signature"), int((answer.get("usage") or {}).get("prompt_tokens") or 0))


async def _post(http_url: str, prompt: str, model: str, timeout_s: float) -> dict[str, Any]:
    url = f"{http_url.rstrip('/')}/v1/completions"
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "kv_transfer_params": HANDOFF}
    tls = caller().tls
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.post(url, json=body, ssl=True if tls is None else tls.client_context()) as response,
        ):
            if response.status != 200:
                raise click.ClickException(f"{url}: {response.status} {(await response.text())[:500]}")
            answer: dict[str, Any] = await response.json()
            return answer
    except (aiohttp.ClientError, TimeoutError) as error:
        raise click.ClickException(f"{url}: {error or 'no answer in time'}") from error


async def _give_back(grpc_address: str, transfer_id: str) -> None:
    try:
        async with WorkerClient(grpc_address, caller=caller()) as worker:
            await worker.release_transfer(transfer_id)
    except WorkerError as error:
        click.echo(f"warning: KV blocks stay held until their lease ends: {error}", err=True)


def _show(decision: Decision) -> None:
    table = Table(box=None, pad_edge=False)
    for name, justify in (
        ("", "left"),
        ("decoder", "left"),
        ("score", "right"),
        ("in flight", "right"),
        ("eligible", "left"),
        ("why", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for candidate in decision.candidates:
        picked = candidate.worker_id == decision.worker_id
        table.add_row(
            "*" if picked else "",
            candidate.worker_id,
            number(candidate.score, 5),
            str(candidate.in_flight),
            "yes" if candidate.eligible else "no",
            candidate.reason,
        )
    console().print(table)
    click.echo(f"{decision.policy}: {decision.worker_id or 'nobody'}, {decision.reason}")
    if decision.fallback:
        click.echo(f"fallback: {decision.fallback}")


def _object(decision: Decision) -> dict[str, Any]:
    return {
        "worker_id": decision.worker_id,
        "policy": decision.policy,
        "reason": decision.reason,
        "fallback": decision.fallback,
        "candidates": [
            {
                "worker_id": candidate.worker_id,
                "eligible": candidate.eligible,
                "score": candidate.score if math.isfinite(candidate.score) else None,
                "in_flight": candidate.in_flight,
                "reason": candidate.reason,
            }
            for candidate in decision.candidates
        ],
    }

"""One prompt through a prefill and a decode worker, without a gateway, for what the engines count."""

import json
from dataclasses import dataclass
from typing import Any

import aiohttp

from eldr.engine.decode_counts import RESULT_KEY, WANTED_KEY
from eldr.gateway.legs import SIGNATURE_KEY
from eldr.rpc.codec import CodecError, signature_from_text
from eldr.signature.expert_signature import ExpertSignature

COMPLETIONS = "/v1/completions"

_HANDOFF_WANTED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
    SIGNATURE_KEY: True,
}


class LegError(Exception):
    """A leg failed or answered something else than counts; the message names the worker."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefillResult:
    """What prefill gave: the prompt's counts, its token ids, and the parameters for a decoder."""

    signature: ExpertSignature
    prompt_token_ids: tuple[int, ...]
    handoff: dict[str, Any]


async def prefill(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], hands_off: bool = True
) -> PrefillResult:
    """The prefill leg of a completion request. Raises LegError.

    Where no decode leg follows, `hands_off` is False and the worker holds nothing. Without the seed: the leg's token
    is thrown away, and a seeded prompt that is prefilled in chunks kills vLLM 0.32.0 on a CPU ("CPU Generator does
    not use offset").
    """
    leg = {
        **{name: value for name, value in body.items() if name != "seed"},
        "max_tokens": 1,
        "min_tokens": 0,
        "return_token_ids": True,
        "kv_transfer_params": _HANDOFF_WANTED if hands_off else {SIGNATURE_KEY: True},
    }
    reply = await _post(session, url, leg)
    params = reply.get("kv_transfer_params") or {}
    signature = _signature(params, SIGNATURE_KEY, f"prefill worker {url}")
    ids = reply["choices"][0].get("prompt_token_ids") or ()
    if not len(ids) == signature.tokens == signature.covered_tokens:
        raise LegError(
            f"prefill worker {url}: the prompt has {len(ids)} tokens, the signature says {signature.tokens} "
            f"and covers {signature.covered_tokens}"
        )
    return PrefillResult(signature, tuple(ids), {k: v for k, v in params.items() if k != SIGNATURE_KEY})


async def decode_counts(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], handoff: dict[str, Any]
) -> ExpertSignature | None:
    """The decode leg; counts of the generated tokens but the last, which is never run. Raises LegError.

    None where only one token was generated, so that none was run.
    """
    reply = await _post(session, url, {**body, "kv_transfer_params": {**handoff, WANTED_KEY: True}})
    generated = reply["usage"]["completion_tokens"]
    if generated == 1:
        return None
    signature = _signature(reply.get("kv_transfer_params") or {}, RESULT_KEY, f"decode worker {url}")
    if not generated - 1 == signature.tokens == signature.covered_tokens:
        raise LegError(
            f"decode worker {url}: {generated} tokens were generated, the counts say {signature.tokens} and "
            f"cover {signature.covered_tokens}, expected {generated - 1}"
        )
    return signature


def _signature(params: dict[str, Any], key: str, worker: str) -> ExpertSignature:
    text = params.get(key)
    if text is None:
        raise LegError(f"{worker}: the reply has no {key}; does it run the eldr connector?")
    try:
        return signature_from_text(text)
    except CodecError as error:
        raise LegError(f"{worker}: {key}: {error}") from error


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        async with session.post(url.rstrip("/") + COMPLETIONS, json=body) as response:
            raw = await response.read()
            status = response.status
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise LegError(f"worker {url}: {error or type(error).__name__}") from error
    if status != 200:
        raise LegError(f"worker {url}: HTTP {status}: {raw[:500].decode('utf-8', 'replace')}")
    try:
        reply = json.loads(raw)
    except ValueError as error:
        raise LegError(f"worker {url}: the reply is not JSON") from error
    if not isinstance(reply, dict) or not reply.get("choices"):
        raise LegError(f"worker {url}: the reply holds no choices")
    return reply

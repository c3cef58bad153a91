"""The two legs of a request as pure functions: what is refused, and the bodies of prefill and decode.

The decode leg is the client's body plus `kv_transfer_params`. The prefill leg is the same prompt for one
token: whatever shapes only the output is left out, whatever shapes the prompt stays.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from eldr.gateway.errors import GatewayError, refused
from eldr.gateway.sampling import KEEP_COUNTS

SIGNATURE_KEY = "eldr_signature"
RESERVATION_KEY = "eldr_reservation_id"
PREFIX_BYTES = 1024
"""Length of the prompt's beginning by which a prefill worker is chosen."""

COMPLETIONS_DEFAULT_MAX_TOKENS = 16
"""What vLLM takes where a completion names no max_tokens."""

_PREFILL_PARAMS: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
    # Asks for the signature also where the worker's connector puts no parameters of its own into the answer.
    SIGNATURE_KEY: True,
}

_OUTPUT_ONLY = (
    "logprob_token_ids",
    "logprobs",
    "max_completion_tokens",
    "request_id",
    "response_format",
    "return_prompt_text",
    "return_token_ids",
    "return_tokens_as_token_ids",
    # The token of this leg is thrown away, and a seeded prompt that is prefilled in chunks kills vLLM 0.32.0 on
    # a CPU ("CPU Generator does not use offset").
    "seed",
    "stream_options",
    "structured_outputs",
    "tool_choice",
    "top_logprobs",
)


_TEXT_PARTS = ("text", "refusal", "input_text", "output_text", "thinking", "reasoning")
"""Types of message parts that vLLM renders as text."""


class Endpoint(StrEnum):
    """The two generation routes."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A checked request. `headers` are those that go on to the workers; `request_id` is only echoed.

    `raw` are fields of the body that nobody here reads, as JSON text; `prefix` is the prompt's, see
    `prompt_prefix`. `ends_s` is when the client's patience ends, by the coordinator's clock. `ordinary` is the field
    for which one worker serves the whole request, empty where two legs do.
    """

    endpoint: Endpoint
    body: Mapping[str, Any]
    request_id: str
    domain: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: Mapping[str, bytes] = field(default_factory=dict)
    prefix: bytes = b""
    ends_s: float = math.inf
    ordinary: str = ""

    @property
    def model(self) -> str:
        """The model that the client names, empty for the default one."""
        return self.body.get("model") or ""

    @property
    def streams(self) -> bool:
        """Whether the client asks for a stream."""
        return bool(self.body.get("stream"))

    @property
    def max_tokens(self) -> int:
        """Upper bound of the output in tokens, 0 where the client sets none."""
        value = self.body.get("max_tokens")
        if self.endpoint is Endpoint.CHAT:
            value = self.body.get("max_completion_tokens") or value
        elif value is None:
            value = COMPLETIONS_DEFAULT_MAX_TOKENS
        copies = self.body.get("n") if self.ordinary else 1
        return _count(_count(value) * max(1, _count(copies)))


def parse_body(endpoint: Endpoint, raw: bytes) -> dict[str, Any]:
    """The JSON object of a request. Raises GatewayError 400 on what two legs cannot serve."""
    body = read_body(raw)
    obstacle = split_obstacle(endpoint, body)
    if obstacle is not None:
        raise refused(*obstacle)
    return body


def read_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request. Raises GatewayError 400 on what nobody could serve."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise GatewayError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise GatewayError(400, f"the body must be a JSON object, got {type(body).__name__}")
    _check_model(body)
    if body.get("kv_transfer_params") is not None:
        raise refused("kv_transfer_params", "kv_transfer_params is set by the gateway, leave it out")
    return body


def _check_model(body: Mapping[str, Any]) -> None:
    model = body.get("model")
    if model is None:
        return
    if not isinstance(model, str):
        raise refused("model", f"model must be a text, got {type(model).__name__}")
    if not model.isprintable():
        raise refused("model", "model holds characters that cannot be printed")


def split_obstacle(endpoint: Endpoint, body: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why two legs cannot serve a request, as the field and a sentence: it would need several hand-offs, or
    prompt-side values that the decoder never computes. None where they can."""
    if body.get("n") not in (None, 1):
        return "n", f"n must be 1, got {body['n']!r}: a hand-off serves one sequence; send n requests"
    if body.get("use_beam_search"):
        return "use_beam_search", "use_beam_search is not supported: a hand-off serves one sequence"
    if body.get("prompt_logprobs") is not None:
        return (
            "prompt_logprobs",
            "prompt_logprobs is not supported: the decoder takes over the prompt's KV and computes no "
            "logits for it",
        )
    if body.get("echo"):
        return (
            "echo",
            "echo is not supported: the decoder takes over the prompt's KV and computes no logits for it",
        )
    if _is_negative(body.get("truncate_prompt_tokens")):
        return (
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens must name the tokens to keep, got {body['truncate_prompt_tokens']}: the "
            "length that the model leaves free differs between the prefill and the decode leg",
        )
    return _message_obstacle(body) if endpoint is Endpoint.CHAT else _prompt_obstacle(body)


def _prompt_obstacle(body: Mapping[str, Any]) -> tuple[str, str] | None:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(item, int) for item in prompt):
        return (
            "prompt",
            f"several prompts in one request are not supported, got {len(prompt)}: a hand-off serves one "
            "prompt; send one request for each",
        )
    if body.get("prompt_embeds") is not None:
        return "prompt_embeds", "prompt_embeds is not supported: a hand-off needs token ids"
    return None


def _message_obstacle(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """Images, sound and video: their encoder's output is no part of a hand-off."""
    messages = body.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if kind not in _TEXT_PARTS:
                return (
                    "messages",
                    f"messages[{index}].content holds a part of type {kind!r}: only text is supported",
                )
    return None


def prompt_prefix(endpoint: Endpoint, body: Mapping[str, Any]) -> bytes:
    """First 1,024 bytes of the prompt: UTF-8 text, or token ids as 4 bytes each, little-endian.

    Equal for prompts that begin alike, so that they meet their prefix cache. Empty where the prompt is
    malformed; the prefill worker then says what is wrong with it.
    """
    out = bytearray()
    for piece in _chat_pieces(body) if endpoint is Endpoint.CHAT else _prompt_pieces(body.get("prompt")):
        out += piece
        if len(out) >= PREFIX_BYTES:
            break
    return bytes(out[:PREFIX_BYTES])


def _prompt_pieces(prompt: object) -> Iterator[bytes]:
    if isinstance(prompt, str):
        yield _utf8(prompt)
    elif isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        yield from _prompt_pieces(prompt[0])
    elif isinstance(prompt, list):
        for token in prompt[: PREFIX_BYTES // 4]:
            if isinstance(token, int) and 0 <= token < 1 << 32:
                yield token.to_bytes(4, "little")


def _chat_pieces(body: Mapping[str, Any]) -> Iterator[bytes]:
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            continue
        yield _utf8(f"{message.get('role')}\n")
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield _utf8(text)


def prefill_body(request: ClientRequest) -> dict[str, Any]:
    """The body of the prefill leg: the client's prompt, one token, nothing parsed out of it.

    Tools stay, since the chat template renders them. `tool_choice` goes (case 2.14), as null and not as
    "none", which makes vLLM render the prompt without its tools under --exclude-tools-when-tool-choice-none.
    """
    body = {name: value for name, value in request.body.items() if name not in _OUTPUT_ONLY}
    body.update(max_tokens=1, min_tokens=0, n=1, stream=False, kv_transfer_params=dict(_PREFILL_PARAMS))
    if body.get("tools"):
        body["tool_choice"] = "none" if request.body.get("tool_choice") == "none" else None
    if pins_prompt(request):
        body["return_token_ids"] = True
    return body


def pins_prompt(request: ClientRequest) -> bool:
    """Whether the decode leg takes the prefill leg's token ids instead of rendering the chat again.

    A few renderers of vLLM (Kimi K3) write a forced tool choice or the response format into the prompt. The
    prefill leg has neither, so the decoder would pull the KV of another text.
    """
    if request.endpoint is not Endpoint.CHAT:
        return False
    forced = request.body.get("tool_choice") not in (None, "auto", "none")
    return forced or request.body.get("response_format") is not None


@dataclass(frozen=True, slots=True)
class PrefillReply:
    """What the prefill leg gave: `params` go on to the decoder as they are, without the signature.

    `transfer_id` is empty where the prefill worker holds nothing for the decoder, which finds the KV in shared
    storage or computes it again. `signature` is the base64 text of `eldr_signature`, None where the worker gave
    none. `prompt_token_ids` is None unless a chat leg asked for them. `answer` is the whole completion object.
    """

    params: Mapping[str, Any]
    transfer_id: str
    signature: str | None
    prompt_tokens: int
    prompt_token_ids: list[int] | None
    answer: Mapping[str, Any]


class ReplyError(ValueError):
    """An HTTP 200 that is no answer."""


def read_prefill_reply(raw: bytes) -> PrefillReply:
    """Takes a prefill reply apart. Raises ReplyError where it is an error or holds no hand-off.

    An answer with the signature's key and no transfer is one from a connector that keeps the KV elsewhere.
    """
    reply = read_reply(raw)
    params = reply.get("kv_transfer_params")
    params = dict(params) if isinstance(params, dict) else {}
    transfer_id = params.get("remote_request_id", "")
    if not isinstance(transfer_id, str) or not (transfer_id or SIGNATURE_KEY in params):
        raise ReplyError(
            f"the prefill reply holds no hand-off (kv_transfer_params with remote_request_id or {SIGNATURE_KEY})"
        )
    signature = params.pop(SIGNATURE_KEY, None)
    ids = reply.get("prompt_token_ids")
    return PrefillReply(
        params=params,
        transfer_id=transfer_id,
        signature=signature if isinstance(signature, str) else None,
        prompt_tokens=usage_of(reply, "prompt_tokens"),
        prompt_token_ids=ids if isinstance(ids, list) else None,
        answer=reply,
    )


def decode_body(
    request: ClientRequest, reply: PrefillReply, reservation_id: str, keep_counts: bool = False
) -> dict[str, Any]:
    """The client's own body with the hand-off in it. The signature stays here: it is large."""
    params = {**reply.params, RESERVATION_KEY: reservation_id, **(KEEP_COUNTS if keep_counts else {})}
    if pins_prompt(request) and reply.prompt_token_ids:
        params["prompt_token_ids"] = reply.prompt_token_ids
    body = {name: value for name, value in request.body.items() if name != "request_id"}
    return {**body, "kv_transfer_params": params}


def ordinary_body(request: ClientRequest, reservation_id: str) -> dict[str, Any]:
    """The client's own body for one worker that serves both prompt and output."""
    body = {name: value for name, value in request.body.items() if name != "request_id"}
    return {**body, "kv_transfer_params": {RESERVATION_KEY: reservation_id}}


def read_reply(raw: bytes) -> dict[str, Any]:
    """A completion object. Raises ReplyError where it is an error in spite of its HTTP 200 (case 2.18)."""
    try:
        reply = json.loads(raw)
    except ValueError as error:
        raise ReplyError(f"the reply is not JSON: {error}") from error
    if not isinstance(reply, dict):
        raise ReplyError(f"the reply must be a JSON object, got {type(reply).__name__}")
    failure = failure_of(reply)
    if failure:
        raise ReplyError(failure)
    if not isinstance(reply.get("choices"), list) or not reply["choices"]:
        raise ReplyError("the reply holds no choices")
    return reply


def failure_of(reply: Mapping[str, Any]) -> str:
    """What failed in the engine according to a completion object or a chunk of one, empty for nothing."""
    error = reply.get("error")
    if error:
        message = error.get("message") if isinstance(error, dict) else error
        return str(message)
    for choice in reply.get("choices") or ():
        if isinstance(choice, dict) and choice.get("finish_reason") == "error":
            return "the engine ended the request with finish_reason error"
    return ""


def usage_of(reply: Mapping[str, Any], name: str) -> int:
    """A token count of the reply's usage, 0 where there is none."""
    usage = reply.get("usage")
    return _count(usage.get(name)) if isinstance(usage, dict) else 0


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value < 1 << 32 else 0


def _is_negative(value: object) -> bool:
    return isinstance(value, (int, float)) and value < 0


def _utf8(text: str) -> bytes:
    return text[:PREFIX_BYTES].encode("utf-8", "surrogatepass")

"""The first token from prefill, as pure functions: which requests allow it, and the two legs as one answer.

The prefill leg samples with the client's own parameters. Its token goes to the client, and the decode leg goes on
from exactly that history: the prompt's token ids and the token, with one token less to make. That is the same
output only where no parameter looks back at the output, so parameters are let in by name and everything else takes
the ordinary path.

Only greedy requests qualify. A token whose text is no whole character cannot be sent, and a decoder cannot continue
its text, so it is thrown away and sampled again. Greedy sampling makes the same token again; random sampling would
make such tokens rarer than the model does.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from eldr.gateway.counters import Counts, Event
from eldr.gateway.legs import (
    COMPLETIONS_DEFAULT_MAX_TOKENS,
    ClientRequest,
    Endpoint,
    PrefillReply,
    ReplyError,
    prefill_body,
    read_reply,
    usage_of,
)

_STATELESS = frozenset(
    {
        "add_special_tokens",
        "allowed_token_ids",
        "cache_salt",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "max_tokens",
        "min_p",
        "min_tokens",
        "model",
        "priority",
        "prompt",
        "request_id",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "seed",
        "stop_token_ids",
        "stream",
        "stream_options",
        "temperature",
        "top_k",
        "top_p",
        "user",
    }
)
"""Fields whose effect on a greedy token does not depend on which of the tokens before it are output."""

_NEUTRAL: Mapping[str, tuple[Event, tuple[Any, ...]]] = {
    "frequency_penalty": (Event.FIRST_TOKEN_PENALTY, (0,)),
    "presence_penalty": (Event.FIRST_TOKEN_PENALTY, (0,)),
    "repetition_penalty": (Event.FIRST_TOKEN_PENALTY, (1,)),
    "logprobs": (Event.FIRST_TOKEN_LOGPROBS, ()),
    "stop": (Event.FIRST_TOKEN_STOP, ("", [])),
    "bad_words": (Event.FIRST_TOKEN_STOP, ([],)),
    "n": (Event.FIRST_TOKEN_PARAMETER, (1,)),
    "echo": (Event.FIRST_TOKEN_PARAMETER, (False,)),
    "use_beam_search": (Event.FIRST_TOKEN_PARAMETER, (False,)),
    "skip_special_tokens": (Event.FIRST_TOKEN_PARAMETER, (True,)),
    "spaces_between_special_tokens": (Event.FIRST_TOKEN_PARAMETER, (True,)),
}
"""Fields that bar the first token unless they hold one of these values, which are what an absent field means."""

_STREAM_OPTIONS = frozenset({"include_usage", "continuous_usage_stats"})

_UNFINISHED = "\ufffd"
"""What stands for bytes that are no whole character yet."""


def obstacle(request: ClientRequest) -> Event | None:
    """Why a request takes the ordinary path, None where its first token may come from prefill."""
    if request.endpoint is Endpoint.CHAT:
        return Event.FIRST_TOKEN_CHAT
    if request.body.get("temperature") != 0:
        return Event.FIRST_TOKEN_SAMPLED
    for name, value in request.body.items():
        if value is None or name in _STATELESS:
            continue
        reason, neutral = _NEUTRAL.get(name, (Event.FIRST_TOKEN_PARAMETER, ()))
        if value not in neutral:
            return reason
    limit, least = _limits(request)
    if type(limit) is not int or type(least) is not int or not 0 <= least <= limit or limit < 1:
        return Event.FIRST_TOKEN_LIMITS
    options = request.body.get("stream_options")
    if options is not None and not (
        request.streams
        and isinstance(options, dict)
        and _STREAM_OPTIONS.issuperset(options)
        and all(type(value) is bool for value in options.values())
    ):
        return Event.FIRST_TOKEN_PARAMETER
    return None


def may_begin(request: ClientRequest, counts: Counts) -> bool:
    """Whether the first token shall come from prefill; why not is counted."""
    if request.ordinary:
        return False
    reason = obstacle(request)
    if reason is not None:
        counts[reason] += 1
    return reason is None


def _limits(request: ClientRequest) -> tuple[Any, Any]:
    """max_tokens and min_tokens as the client gave them. max_tokens null is as many as the model has room for."""
    return request.body.get("max_tokens", COMPLETIONS_DEFAULT_MAX_TOKENS), request.body.get("min_tokens") or 0


def sampling_prefill_body(request: ClientRequest) -> dict[str, Any]:
    """The body of a prefill leg whose token counts: an end token is barred where the client bars it."""
    _, least = _limits(request)
    return {**prefill_body(request), "min_tokens": min(1, least), "return_token_ids": True}


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A sampled token that is the beginning of the answer.

    `answer` is the prefill leg's completion object. `is_last` where the answer ends with this token.
    """

    request: ClientRequest
    answer: Mapping[str, Any]
    prompt_token_ids: list[int]
    token_ids: list[int]
    is_last: bool

    @property
    def choice(self) -> Mapping[str, Any]:
        """The one choice of the answer."""
        choice: Mapping[str, Any] = self.answer["choices"][0]
        return choice

    @property
    def shows_ids(self) -> bool:
        """Whether the client asked for token ids."""
        return bool(self.request.body.get("return_token_ids"))

    @property
    def continuation(self) -> ClientRequest:
        """The rest of the request: prompt and first token as token ids, one token less to make."""
        limit, least = _limits(self.request)
        body = dict(self.request.body)
        body["prompt"] = self.prompt_token_ids + self.token_ids
        body["max_tokens"] = limit - 1
        if least:
            body["min_tokens"] = least - 1
        return replace(self.request, body=body)


def read_first_token(request: ClientRequest, reply: PrefillReply) -> FirstToken | Event:
    """The first token of a prefill reply, or why the reply is only a hand-off."""
    choice = reply.answer["choices"][0]
    if not isinstance(choice, dict):
        return Event.FIRST_TOKEN_NO_IDS
    prompt_ids, token_ids = choice.get("prompt_token_ids"), choice.get("token_ids")
    text, finish = choice.get("text"), choice.get("finish_reason")
    if not (isinstance(prompt_ids, list) and isinstance(token_ids, list) and len(token_ids) == 1):
        return Event.FIRST_TOKEN_NO_IDS
    limit, _ = _limits(request)
    if reply.params.get("remote_num_tokens") != len(prompt_ids):
        return Event.FIRST_TOKEN_COVERAGE
    if finish == "stop" or limit == 1:
        return FirstToken(request, reply.answer, prompt_ids, token_ids, is_last=True)
    if not isinstance(text, str) or not text or _UNFINISHED in text:
        return Event.FIRST_TOKEN_TEXT
    return FirstToken(request, reply.answer, prompt_ids, token_ids, is_last=False)


def first_events(first: FirstToken) -> bytes:
    """Server-sent events up to and with the first token; the whole stream where that is the last one.

    The fields are those of a chunk of vLLM's completion stream.
    """
    options = first.request.body.get("stream_options") or {}
    reports = bool(options.get("include_usage"))
    head = {"id": first.answer.get("id"), "object": "text_completion", "created": first.answer.get("created")}
    head["model"] = first.answer.get("model")
    usage = _usage(len(first.prompt_token_ids), 1)
    chunk: dict[str, Any] = {
        **head,
        "choices": [
            {
                "index": 0,
                "text": first.choice.get("text"),
                "logprobs": None,
                "finish_reason": first.choice.get("finish_reason") if first.is_last else None,
                "stop_reason": first.choice.get("stop_reason") if first.is_last else None,
                "prompt_token_ids": first.prompt_token_ids if first.shows_ids else None,
                "token_ids": first.token_ids if first.shows_ids else None,
            }
        ],
    }
    if reports and options.get("continuous_usage_stats"):
        chunk["usage"] = usage
    if not first.is_last:
        return _event(chunk)
    stamp = first.answer.get("system_fingerprint")
    seal = {} if stamp is None else {"system_fingerprint": stamp}
    if not reports:
        return _event({**chunk, **seal}) + _event("[DONE]")
    return _event(chunk) + _event({**head, "choices": [], "usage": usage, **seal}) + _event("[DONE]")


def whole_answer(first: FirstToken) -> bytes:
    """The JSON answer to a request that ends with its first token: the prefill leg's, without the hand-off."""
    ids = {} if first.shows_ids else {"prompt_token_ids": None, "token_ids": None}
    return _json({**first.answer, "choices": [{**first.choice, **ids}], "kv_transfer_params": None}).encode()


def merged_answer(first: FirstToken, raw: bytes) -> bytes:
    """The decode leg's JSON answer with the first token in front. Raises ReplyError where it is none."""
    answer = read_reply(raw)
    choice = dict(answer["choices"][0])
    choice["text"] = f"{first.choice.get('text')}{choice.get('text', '')}"
    if first.shows_ids:
        choice["prompt_token_ids"] = first.prompt_token_ids
        choice["token_ids"] = first.token_ids + list(choice.get("token_ids") or ())
    return _json({**answer, "choices": [choice], "usage": _shifted(answer)}).encode()


def later_event(first: FirstToken, event: bytes) -> bytes:
    """An event of the decode leg's stream as a later event of the stream that the first token began.

    Raises ReplyError where it is not JSON.
    """
    payload = event.removeprefix(b"data:").strip()
    if not event.startswith(b"data:") or payload == b"[DONE]":
        return event
    try:
        chunk = json.loads(payload)
    except ValueError as error:
        raise ReplyError(f"an event is not JSON: {error}") from error
    if not isinstance(chunk, dict):
        raise ReplyError(f"an event must be a JSON object, got {type(chunk).__name__}")
    for name in ("id", "created"):
        chunk[name] = first.answer.get(name)
    for choice in chunk.get("choices") or ():
        if choice.get("prompt_token_ids") is not None:
            choice["prompt_token_ids"] = None
    if chunk.get("usage") is not None:
        chunk["usage"] = _shifted(chunk)
    return f"data: {_json(chunk)}".encode()


def _shifted(reply: Mapping[str, Any]) -> dict[str, Any]:
    """The usage of a decode leg with its last prompt token counted as output."""
    counted = _usage(usage_of(reply, "prompt_tokens") - 1, usage_of(reply, "completion_tokens") + 1)
    return {**(reply.get("usage") or {}), **counted}


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _event(data: Mapping[str, Any] | str) -> bytes:
    return f"data: {data if isinstance(data, str) else _json(data)}\n\n".encode()


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

"""The types that vLLM's request models ask for, so that a fake engine refuses what vLLM refuses, with a 400."""

import math
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]


def _whole(low: int) -> Check:
    return lambda value: type(value) is int and low <= value < 1 << 63


def _is(*kinds: type) -> Check:
    return lambda value: isinstance(value, kinds)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1 << 63 and math.isfinite(value) and value >= 0


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


_TOKENS = _list_of(_whole(0))


def _prompt(value: Any) -> bool:
    several = isinstance(value, list) and bool(value)
    return _text(value) or (several and any(_list_of(kind)(value) for kind in (_whole(0), _text, _TOKENS)))


def _message(value: Any) -> bool:
    if not isinstance(value, dict) or not _text(value.get("role")):
        return False
    content = value.get("content")
    return content is None or _text(content) or _list_of(_is(dict))(content)


_FIELDS: Mapping[str, Check] = {
    "model": _text,
    "max_tokens": _whole(1),
    "max_completion_tokens": _whole(1),
    "min_tokens": _whole(0),
    "n": _whole(1),
    "seed": _whole(-(1 << 63)),
    "temperature": _number,
    "stream": _is(bool),
    "echo": _is(bool),
    "stop": lambda value: _text(value) or _list_of(_text)(value),
    "tools": _list_of(_is(dict)),
    "tool_choice": _is(str, dict),
    "response_format": _is(dict),
    "structured_outputs": _is(dict),
    "stream_options": _is(dict),
    "return_token_ids": _is(bool),
    "kv_transfer_params": _is(dict),
}


def wrong_field(path: str, body: Any) -> str:
    """The field of a request that has a type or value that vLLM refuses; empty where there is none."""
    if not isinstance(body, dict):
        return "body"
    required: tuple[str, Check] = ("prompt", _prompt)
    if path.endswith("/chat/completions"):
        required = ("messages", lambda value: bool(value) and _list_of(_message)(value))
    if not required[1](body.get(required[0])):
        return required[0]
    for name, check in _FIELDS.items():
        # Of these, min_tokens alone may not be null.
        null = body.get(name) is None and not (name == "min_tokens" and name in body)
        if not null and not check(body[name]):
            return name
    return ""

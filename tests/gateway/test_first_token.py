"""Which requests take their first token from prefill, and how two legs become one answer."""

import json
from typing import Any

import pytest

from eldr.gateway.counters import Event
from eldr.gateway.first_token import (
    FirstToken,
    first_events,
    later_event,
    merged_answer,
    obstacle,
    read_first_token,
    sampling_prefill_body,
    whole_answer,
)
from eldr.gateway.legs import ClientRequest, Endpoint, PrefillReply, ReplyError

GREEDY = {"model": "m", "prompt": "a b", "temperature": 0, "max_tokens": 4}


def request_of(endpoint: Endpoint = Endpoint.COMPLETIONS, **more: Any) -> ClientRequest:
    body = {name: value for name, value in {**GREEDY, **more}.items() if value != "absent"}
    return ClientRequest(endpoint, body, "r")


def reply_of(**choice: Any) -> PrefillReply:
    held = choice.pop("held", 2)
    told = {"index": 0, "text": " x", "finish_reason": "length", "stop_reason": None}
    told |= {"prompt_token_ids": [5, 6], "token_ids": [7], **choice}
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    answer = {"id": "cmpl-p", "object": "text_completion", "created": 9, "model": "m", "choices": [told]}
    answer |= {"system_fingerprint": "fp", "usage": usage, "kv_transfer_params": {"remote_num_tokens": held}}
    return PrefillReply({"remote_num_tokens": held}, "t", None, 2, None, answer)


def first_of(request: ClientRequest, **choice: Any) -> FirstToken:
    first = read_first_token(request, reply_of(**choice))
    assert isinstance(first, FirstToken)
    return first


def data_of(events: bytes) -> list[Any]:
    texts = [event.removeprefix("data: ") for event in events.decode().split("\n\n") if event]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"max_tokens": "absent"},
        {"max_tokens": 1, "min_tokens": 1},
        {"seed": 3, "top_p": 0.5, "top_k": 3, "min_p": 0.1},
        {"logit_bias": {"3": 1}, "allowed_token_ids": [3], "stop_token_ids": [4], "ignore_eos": True},
        {"frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0},
        {"stop": [], "bad_words": [], "n": 1, "echo": False, "logprobs": None, "skip_special_tokens": True},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)
def test_what_does_not_look_back_at_the_output_may_begin_at_prefill(more):
    assert obstacle(request_of(**more)) is None


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"temperature": 0.7}, Event.FIRST_TOKEN_SAMPLED),
        ({"temperature": "absent"}, Event.FIRST_TOKEN_SAMPLED),
        ({"temperature": 0.7, "seed": 3}, Event.FIRST_TOKEN_SAMPLED),
        ({"frequency_penalty": 0.5}, Event.FIRST_TOKEN_PENALTY),
        ({"presence_penalty": 0.5}, Event.FIRST_TOKEN_PENALTY),
        ({"repetition_penalty": 1.1}, Event.FIRST_TOKEN_PENALTY),
        ({"logprobs": 0}, Event.FIRST_TOKEN_LOGPROBS),
        ({"stop": "\n"}, Event.FIRST_TOKEN_STOP),
        ({"stop": ["\n"]}, Event.FIRST_TOKEN_STOP),
        ({"bad_words": ["a b"]}, Event.FIRST_TOKEN_STOP),
        ({"response_format": {"type": "json_object"}}, Event.FIRST_TOKEN_PARAMETER),
        ({"structured_outputs": {"regex": "a"}}, Event.FIRST_TOKEN_PARAMETER),
        ({"skip_special_tokens": False}, Event.FIRST_TOKEN_PARAMETER),
        ({"truncate_prompt_tokens": 5}, Event.FIRST_TOKEN_PARAMETER),
        ({"suffix": "end"}, Event.FIRST_TOKEN_PARAMETER),
        ({"a_field_of_tomorrow": 1}, Event.FIRST_TOKEN_PARAMETER),
        ({"stream_options": {"include_usage": True}}, Event.FIRST_TOKEN_PARAMETER),
        ({"stream": True, "stream_options": {"more": True}}, Event.FIRST_TOKEN_PARAMETER),
        ({"max_tokens": None}, Event.FIRST_TOKEN_LIMITS),
        ({"max_tokens": 0}, Event.FIRST_TOKEN_LIMITS),
        ({"max_tokens": True}, Event.FIRST_TOKEN_LIMITS),
        ({"min_tokens": 5}, Event.FIRST_TOKEN_LIMITS),
        ({"min_tokens": "2"}, Event.FIRST_TOKEN_LIMITS),
    ],
)
def test_everything_else_takes_the_ordinary_path_for_a_named_reason(more, reason):
    assert obstacle(request_of(**more)) is reason


def test_a_chat_takes_the_ordinary_path():
    assert obstacle(request_of(Endpoint.CHAT)) is Event.FIRST_TOKEN_CHAT


@pytest.mark.parametrize(("least", "of_prefill"), [(0, 0), (1, 1), (3, 1)])
def test_the_prefill_leg_bars_an_end_token_where_the_client_does(least, of_prefill):
    body = sampling_prefill_body(request_of(min_tokens=least, stop_token_ids=[4]))
    assert (body["max_tokens"], body["min_tokens"], body["return_token_ids"]) == (1, of_prefill, True)
    assert (body["temperature"], body["stop_token_ids"], body["stream"]) == (0, [4], False)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"token_ids": None}, Event.FIRST_TOKEN_NO_IDS),
        ({"token_ids": [1, 2]}, Event.FIRST_TOKEN_NO_IDS),
        ({"prompt_token_ids": None}, Event.FIRST_TOKEN_NO_IDS),
        ({"held": None}, Event.FIRST_TOKEN_COVERAGE),
        ({"held": 1, "finish_reason": "stop"}, Event.FIRST_TOKEN_COVERAGE),
        ({"text": ""}, Event.FIRST_TOKEN_TEXT),
        ({"text": None}, Event.FIRST_TOKEN_TEXT),
        ({"text": "a\ufffd"}, Event.FIRST_TOKEN_TEXT),
    ],
)
def test_a_prefill_reply_that_proves_nothing_is_only_a_hand_off(choice, reason):
    assert read_first_token(request_of(), reply_of(**choice)) is reason


def test_a_choice_that_is_no_object_is_only_a_hand_off():
    reply = reply_of()
    broken = PrefillReply(reply.params, "t", None, 2, None, {**reply.answer, "choices": ["?"]})
    assert read_first_token(request_of(), broken) is Event.FIRST_TOKEN_NO_IDS


def test_an_end_token_or_the_only_token_is_the_last():
    assert first_of(request_of(), text="", finish_reason="stop").is_last
    assert first_of(request_of(max_tokens=1), text="\ufffd").is_last
    assert not first_of(request_of()).is_last


def test_the_rest_goes_on_from_the_exact_history_with_one_token_less():
    request = request_of(min_tokens=3, return_token_ids=True)
    body = first_of(request).continuation.body
    assert body == {**request.body, "prompt": [5, 6, 7], "max_tokens": 3, "min_tokens": 2}
    assert request.body["prompt"] == "a b"


def test_an_absent_limit_is_16_tokens_of_which_15_are_left():
    body = first_of(request_of(max_tokens="absent")).continuation.body
    assert body["max_tokens"] == 15
    assert "min_tokens" not in body


@pytest.mark.parametrize("shown", [True, False])
def test_the_first_event_has_the_fields_of_a_chunk(shown):
    (chunk,) = data_of(first_events(first_of(request_of(stream=True, return_token_ids=shown))))
    assert list(chunk) == ["id", "object", "created", "model", "choices"]
    assert chunk["choices"] == [
        {
            "index": 0,
            "text": " x",
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
            "prompt_token_ids": [5, 6] if shown else None,
            "token_ids": [7] if shown else None,
        }
    ]


def test_the_first_event_counts_where_the_client_asks_for_it_at_every_token():
    options = {"include_usage": True, "continuous_usage_stats": True}
    (chunk,) = data_of(first_events(first_of(request_of(stream=True, stream_options=options))))
    assert chunk["usage"] == {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}


def test_a_stream_that_ends_with_its_first_token_is_whole():
    first = first_of(request_of(stream=True), text="", finish_reason="stop", stop_reason=4)
    chunk, end = data_of(first_events(first))
    assert (chunk["choices"][0]["finish_reason"], chunk["choices"][0]["stop_reason"]) == ("stop", 4)
    assert (chunk["system_fingerprint"], end) == ("fp", "[DONE]")


def test_the_usage_event_of_a_stream_that_ends_with_its_first_token_carries_the_fingerprint():
    request = request_of(stream=True, max_tokens=1, stream_options={"include_usage": True})
    chunk, usage, end = data_of(first_events(first_of(request)))
    assert "system_fingerprint" not in chunk
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 1)
    assert (usage["system_fingerprint"], end) == ("fp", "[DONE]")


def test_a_whole_answer_holds_no_hand_off_and_no_ids_that_nobody_asked_for():
    answer = json.loads(whole_answer(first_of(request_of(max_tokens=1))))
    assert answer["kv_transfer_params"] is None
    assert (answer["choices"][0]["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (None, None)
    shown = json.loads(whole_answer(first_of(request_of(max_tokens=1, return_token_ids=True))))
    assert (shown["choices"][0]["prompt_token_ids"], shown["choices"][0]["token_ids"]) == ([5, 6], [7])


def test_the_merged_answer_counts_the_clients_prompt_and_every_token():
    first = first_of(request_of(return_token_ids=True))
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6, "prompt_tokens_details": None}
    choice = {"text": " y z", "prompt_token_ids": [5, 6, 7], "token_ids": [8, 9, 1], "finish_reason": "stop"}
    merged = json.loads(merged_answer(first, json.dumps({"choices": [choice], "usage": usage}).encode()))
    assert merged["choices"] == [
        {
            "text": " x y z",
            "prompt_token_ids": [5, 6],
            "token_ids": [7, 8, 9, 1],
            "finish_reason": "stop",
        }
    ]
    assert merged["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": None,
    }


def test_a_later_event_continues_the_stream_that_prefill_began():
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    choice = {"index": 0, "text": "é", "prompt_token_ids": [5, 6, 7], "token_ids": [8]}
    event = {"id": "cmpl-d", "created": 11, "choices": [choice], "usage": usage}
    later = later_event(first_of(request_of()), b"data: " + json.dumps(event).encode())
    assert "é".encode() in later
    (chunk,) = data_of(later)
    assert (chunk["id"], chunk["created"]) == ("cmpl-p", 9)
    assert chunk["choices"] == [{**choice, "prompt_token_ids": None}]
    assert chunk["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}


@pytest.mark.parametrize("event", [b"data: [DONE]", b": keep-alive"])
def test_the_end_and_comments_pass_as_they_are(event):
    assert later_event(first_of(request_of()), event) == event


@pytest.mark.parametrize("event", [b"data: {", b"data: 3"])
def test_an_event_that_is_no_object_is_a_failure(event):
    with pytest.raises(ReplyError, match="an event"):
        later_event(first_of(request_of()), event)

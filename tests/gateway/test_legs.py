"""Bodies of both legs, and what is refused before any worker is asked."""

import json

import pytest

from eldr.gateway.errors import GatewayError
from eldr.gateway.legs import (
    ClientRequest,
    Endpoint,
    ReplyError,
    decode_body,
    parse_body,
    pins_prompt,
    prefill_body,
    prompt_prefix,
    read_prefill_reply,
)

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def completion(**fields) -> ClientRequest:
    return ClientRequest(Endpoint.COMPLETIONS, {"model": "m", "prompt": "a b", **fields}, "r1")


def chat(**fields) -> ClientRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return ClientRequest(Endpoint.CHAT, body, "r1")


def reply_bytes(**params) -> bytes:
    transfer = {"remote_request_id": "t1", "remote_block_ids": [[1]], "do_remote_prefill": True, **params}
    return json.dumps(
        {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 2}, "kv_transfer_params": transfer}
    ).encode()


def test_the_prefill_leg_asks_for_one_token_whatever_the_client_asks_for():
    """Case 2.11."""
    body = prefill_body(
        chat(max_completion_tokens=80, min_tokens=3, n=1, stream=True, stream_options={"include_usage": True})
    )
    assert (body["max_tokens"], body["min_tokens"], body["n"], body["stream"]) == (1, 0, 1, False)
    assert "max_completion_tokens" not in body
    assert "stream_options" not in body
    assert body["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "eldr_signature": True,
    }


def test_sampling_goes_to_both_legs_unchanged():
    fields = {"temperature": 0.8, "top_p": 0.9, "stop": ["x"], "logit_bias": {"5": 1.0}}
    request = completion(**fields)
    decode = decode_body(request, read_prefill_reply(reply_bytes()), "res-1")
    for name, value in fields.items():
        assert prefill_body(request)[name] == value
        assert decode[name] == value


def test_a_seed_goes_to_the_decoder_alone():
    """The decoder samples every token of the answer; a seeded chunked prefill kills vLLM 0.32.0 on a CPU."""
    request = completion(seed=4)
    assert "seed" not in prefill_body(request)
    assert decode_body(request, read_prefill_reply(reply_bytes()), "res-1")["seed"] == 4


def test_the_prefill_leg_computes_no_log_probabilities():
    body = prefill_body(completion(logprobs=5, logprob_token_ids=[1], return_tokens_as_token_ids=True))
    assert not {"logprobs", "logprob_token_ids", "return_tokens_as_token_ids"} & set(body)


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("required", None),
        ({"type": "function", "function": {"name": "f"}}, None),
        ("none", "none"),
        (None, None),
    ],
)
def test_tools_stay_in_the_prefill_leg_but_none_is_forced(choice, sent):
    """Case 2.14. "none" stays, since a server may render the prompt without its tools then."""
    body = prefill_body(chat(tools=TOOLS, tool_choice=choice, response_format={"type": "json_object"}))
    assert body["tools"] == TOOLS
    assert body["tool_choice"] == sent
    assert "response_format" not in body


def test_a_tool_choice_without_tools_is_left_to_the_decoder_to_refuse():
    assert "tool_choice" not in prefill_body(chat(tool_choice="required"))


def test_the_decode_leg_is_the_clients_body_with_the_hand_off_in_it():
    fields = {"max_tokens": 80, "min_tokens": 3, "stream": True, "made_up_field": [1, {"a": None}]}
    body = decode_body(completion(**fields), read_prefill_reply(reply_bytes(eldr_signature="AAAA")), "res-1")
    assert body == {
        "model": "m",
        "prompt": "a b",
        **fields,
        "kv_transfer_params": {
            "remote_request_id": "t1",
            "remote_block_ids": [[1]],
            "do_remote_prefill": True,
            "eldr_reservation_id": "res-1",
        },
    }


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}, {"max_completion_tokens": 9}])
def test_an_absent_max_tokens_stays_absent_in_the_decode_leg(fields):
    """Case 2.12."""
    request = chat(**fields)
    body = decode_body(request, read_prefill_reply(reply_bytes()), "res-1")
    assert {name: body[name] for name in body if name.startswith("max_")} == fields
    assert prefill_body(request)["max_tokens"] == 1


def test_the_upper_bound_of_the_output_is_the_clients_or_vllms_default():
    assert completion().max_tokens == 16
    assert completion(max_tokens=5).max_tokens == 5
    assert chat().max_tokens == 0
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert chat(max_tokens="many").max_tokens == 0


def test_unknown_fields_reach_both_legs():
    """Case 2.32."""
    request = chat(vllm_xargs={"a": 1}, chat_template_kwargs={"enable_thinking": False}, tools=TOOLS)
    decode = decode_body(request, read_prefill_reply(reply_bytes()), "res-1")
    for name in ("vllm_xargs", "chat_template_kwargs", "tools"):
        assert prefill_body(request)[name] == decode[name] == request.body[name]


def test_the_clients_request_id_field_reaches_no_engine():
    """Case 2.15."""
    request = completion(request_id="mine")
    assert "request_id" not in prefill_body(request)
    assert "request_id" not in decode_body(request, read_prefill_reply(reply_bytes()), "res-1")


@pytest.mark.parametrize(
    ("fields", "pinned"),
    [
        ({}, False),
        ({"tools": TOOLS, "tool_choice": "auto"}, False),
        ({"tools": TOOLS, "tool_choice": "required"}, True),
        ({"response_format": {"type": "json_object"}}, True),
    ],
)
def test_a_prompt_that_might_render_differently_is_handed_over_as_token_ids(fields, pinned):
    request = chat(**fields)
    reply = json.loads(reply_bytes())
    reply["prompt_token_ids"] = [5, 6, 7]
    params = decode_body(request, read_prefill_reply(json.dumps(reply).encode()), "r")["kv_transfer_params"]
    assert pins_prompt(request) is pinned
    assert prefill_body(request).get("return_token_ids", False) is pinned
    assert params.get("prompt_token_ids") == ([5, 6, 7] if pinned else None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": "2"}, "n"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ({"model": 5}, "model"),
        ({"model": "a\ud800"}, "model"),
    ],
)
def test_what_two_legs_cannot_serve_is_refused_by_name(fields, param):
    """Cases 2.22 and 2.25."""
    raw = json.dumps({"prompt": "a", **fields}).encode()
    with pytest.raises(GatewayError) as caught:
        parse_body(Endpoint.COMPLETIONS, raw)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"a"', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(raw):
    with pytest.raises(GatewayError) as caught:
        parse_body(Endpoint.CHAT, raw)
    assert caught.value.status == 400


@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2], [[1, 2]]])
def test_one_prompt_is_taken_in_each_form_of_vllm(prompt):
    assert parse_body(Endpoint.COMPLETIONS, json.dumps({"prompt": prompt}).encode())["prompt"] == prompt


def test_the_prefix_is_the_first_1024_bytes_of_the_prompt():
    text = "é" * 2000
    assert prompt_prefix(Endpoint.COMPLETIONS, {"prompt": text}) == text.encode()[:1024]
    ids = prompt_prefix(Endpoint.COMPLETIONS, {"prompt": list(range(1000))})
    assert ids == b"".join(token.to_bytes(4, "little") for token in range(256))
    assert prompt_prefix(Endpoint.COMPLETIONS, {"prompt": [[1, 2]]}) == b"\1\0\0\0\2\0\0\0"


def test_chats_that_begin_alike_have_the_same_prefix():
    system = {"role": "system", "content": "s" * 2000}
    first = {"messages": [system, {"role": "user", "content": "a"}]}
    second = {"messages": [system, {"role": "user", "content": [{"type": "text", "text": "b"}]}]}
    short = {"messages": [{"role": "user", "content": [{"type": "text", "text": "b"}]}]}
    assert prompt_prefix(Endpoint.CHAT, first) == prompt_prefix(Endpoint.CHAT, second)
    assert prompt_prefix(Endpoint.CHAT, short) == b"user\nb"


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": 5}, {"prompt": [-1, 1 << 40, "x"]}, {"messages": "x"}, {"messages": [1, {"content": 5}]}],
)
def test_a_malformed_prompt_has_a_prefix_too(body):
    """The prefill worker says what is wrong with it."""
    assert isinstance(prompt_prefix(Endpoint.COMPLETIONS, body), bytes)
    assert isinstance(prompt_prefix(Endpoint.CHAT, body), bytes)


def test_the_signature_is_taken_out_of_the_prefill_reply():
    reply = read_prefill_reply(reply_bytes(eldr_signature="AAAA"))
    assert (reply.signature, reply.transfer_id, reply.prompt_tokens) == ("AAAA", "t1", 2)
    assert "eldr_signature" not in reply.params
    assert read_prefill_reply(reply_bytes(eldr_signature=None)).signature is None


def test_a_connector_that_keeps_the_kv_elsewhere_hands_over_the_signature_alone():
    """Shared storage, offloading: nothing is held, and nothing in the decode leg looks like a transfer."""
    reply = read_prefill_reply(b'{"choices": [{}], "kv_transfer_params": {"eldr_signature": "AAAA"}}')
    assert (reply.signature, reply.transfer_id) == ("AAAA", "")
    assert decode_body(completion(), reply, "r")["kv_transfer_params"] == {"eldr_reservation_id": "r"}
    unknown = read_prefill_reply(b'{"choices": [{}], "kv_transfer_params": {"eldr_signature": null}}')
    assert (unknown.signature, unknown.transfer_id) == (None, "")


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense",
        b"[]",
        b'{"choices": []}',
        b'{"error": {"message": "engine failed"}}',
        b'{"choices": [{"finish_reason": "error"}], "kv_transfer_params": {"remote_request_id": "t"}}',
        b'{"choices": [{"finish_reason": "length"}], "kv_transfer_params": null}',
        b'{"choices": [{"finish_reason": "length"}], "kv_transfer_params": {}}',
        b'{"choices": [{"finish_reason": "length"}], "kv_transfer_params": {"remote_request_id": 5}}',
    ],
)
def test_a_prefill_reply_without_a_hand_off_is_an_error(raw):
    with pytest.raises(ReplyError):
        read_prefill_reply(raw)

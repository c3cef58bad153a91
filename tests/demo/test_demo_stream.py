"""Token ids and times are read out of an event stream."""

import json

import pytest

from eldr.demo.stream import StreamError, TokenStream


def event(**choice):
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n"


def test_tokens_are_timed_at_the_first_and_the_last():
    stream = TokenStream()
    stream.feed(event(prompt_token_ids=[5, 6], token_ids=[1]), 10.0)
    stream.feed(b"\n", 10.5)
    stream.feed(event(prompt_token_ids=None, token_ids=[2, 3]), 11.0)
    stream.feed(b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n', 12.0)
    stream.feed(b"data: [DONE]\n", 13.0)
    assert stream.prompt_token_ids == (5, 6)
    assert stream.token_ids == [1, 2, 3]
    assert (stream.first_s, stream.last_s, stream.ended) == (10.0, 11.0, True)


def test_an_event_without_tokens_does_not_count_as_the_first():
    stream = TokenStream()
    stream.feed(event(token_ids=[]), 1.0)
    stream.feed(event(token_ids=[9]), 2.0)
    assert stream.first_s == 2.0


def test_comments_and_other_fields_are_skipped():
    stream = TokenStream()
    for line in (b": ping\n", b"event: message\n", b"\r\n"):
        stream.feed(line, 1.0)
    assert stream == TokenStream()


@pytest.mark.parametrize(
    ("line", "message"),
    [(b'data: {"error": {"message": "gone"}}\n', "gone"), (b"data: {oops\n", "not JSON")],
)
def test_an_error_in_the_stream_is_raised(line, message):
    with pytest.raises(StreamError, match=message):
        TokenStream().feed(line, 1.0)

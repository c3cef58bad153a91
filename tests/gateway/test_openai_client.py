"""The API as its official client sees it."""

import openai
import pytest

from eldr.gateway.counters import Event
from eldr.testing.faults import Fault, FaultKind

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
MESSAGES = [{"role": "user", "content": "hello there"}]


@pytest.fixture
async def client_of():
    made = []

    def of(fleet, **options) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(
            base_url=fleet.url + "/v1", api_key="key", **{"max_retries": 0, **options}
        )
        made.append(client)
        return client

    yield of
    for client in made:
        await client.close()


@pytest.fixture
def client(fleet, client_of) -> openai.AsyncOpenAI:
    return client_of(fleet)


async def test_a_completion(fleet, client):
    answer = await client.completions.create(model="fake", prompt="a b", max_tokens=5, seed=3, stop=["x"])
    assert answer.choices[0].text == await fleet.text_of_plain({"prompt": "a b", "max_tokens": 5, "seed": 3})
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 5)


async def test_a_completion_of_token_ids(client):
    answer = await client.completions.create(model="fake", prompt=[5, 6, 7], max_tokens=4)
    assert answer.usage.prompt_tokens == 3


async def test_a_streamed_completion_with_usage(fleet, client):
    stream = await client.completions.create(
        model="fake",
        prompt="a b",
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"min_tokens": 2},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == await fleet.text_of_plain({"prompt": "a b", "max_tokens": 4})
    assert chunks[-1].usage.completion_tokens == 4


async def test_a_chat_streamed_and_whole(fleet, client):
    asked = {"model": "fake", "messages": MESSAGES, "max_completion_tokens": 4}
    answer = await client.chat.completions.create(**asked)
    stream = await client.chat.completions.create(**asked, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    plain = await fleet.text_of_plain(
        {"messages": MESSAGES, "max_completion_tokens": 4}, "/v1/chat/completions"
    )
    assert answer.choices[0].message.content == text == plain


@pytest.mark.parametrize(
    "choice", ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}]
)
async def test_a_chat_with_tools_reaches_both_legs(fleet, client, choice):
    """Cases 2.14 and 2.32."""
    await client.chat.completions.create(
        model="fake", messages=MESSAGES, tools=TOOLS, tool_choice=choice, max_tokens=4
    )
    prefill, decode = fleet.sent_to(fleet.prefills)[0], fleet.sent_to(fleet.decodes)[0]
    assert prefill["tools"] == decode["tools"] == TOOLS
    assert decode["tool_choice"] == choice


async def test_structured_output_is_the_decoders_alone(fleet, client):
    schema = {"name": "s", "schema": {"type": "object", "properties": {}}}
    await client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        max_tokens=4,
        response_format={"type": "json_schema", "json_schema": schema},
        logprobs=True,
        top_logprobs=2,
    )
    prefill, decode = fleet.sent_to(fleet.prefills)[0], fleet.sent_to(fleet.decodes)[0]
    assert not {"response_format", "logprobs", "top_logprobs"} & set(prefill)
    assert (decode["response_format"]["type"], decode["top_logprobs"]) == ("json_schema", 2)


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("n", {"n": 2}),
        ("echo", {"echo": True}),
        ("prompt", {"prompt": ["a", "b"]}),
        ("prompt", {"prompt": [[1, 2], [3]]}),
        ("prompt_logprobs", {"extra_body": {"prompt_logprobs": 1}}),
    ],
)
async def test_what_two_legs_cannot_serve_is_a_bad_request_that_names_the_field(client, fleet, field, asked):
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.completions.create(**{"model": "fake", "prompt": "a", **asked})
    assert refusal.value.param == field
    assert fleet.sent_to(fleet.prefills) == []


async def test_pictures_and_sound_are_a_bad_request(client, fleet):
    for part in (
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
    ):
        content = [{"type": "text", "text": "what is this"}, part]
        with pytest.raises(openai.BadRequestError, match="only text is supported") as refusal:
            await client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": content}]
            )
        assert refusal.value.param == "messages"
    assert fleet.sent_to(fleet.prefills) == []


async def test_by_configuration_one_worker_serves_alone_what_two_legs_cannot(make_fleet, client_of):
    fleet = await make_fleet(ordinary_fallback=True)
    client = client_of(fleet)
    answer = await client.completions.create(model="fake", prompt=["a", "b"], n=2, max_tokens=3, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    stream = await client.chat.completions.create(
        model="fake", messages=MESSAGES, n=2, max_tokens=3, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.choices[0].index for chunk in chunks} == {0, 1}
    raw = await client.completions.with_raw_response.create(model="fake", prompt="a", n=2)
    assert raw.headers["x-eldr-ordinary"] == "n"
    assert (await client.completions.create(model="fake", prompt="a")).choices[0].text
    await fleet.settled()
    assert fleet.counts[Event.ORDINARY] == 3
    assert len(fleet.sent_to(fleet.prefills)) == 1, "the last request alone takes two legs"
    for body in fleet.sent_to(fleet.decodes)[:3]:
        assert set(body["kv_transfer_params"]) == {"eldr_reservation_id"}
    assert not any(engine.crashed for engine in fleet.decodes)
    assert [query["max_tokens"] for query in fleet.router.decode_queries] == [6, 6, 32, 16]
    assert fleet.nothing_is_held()


async def test_an_ordinary_pass_is_tried_on_another_worker_too(make_fleet, client_of):
    fleet = await make_fleet(ordinary_fallback=True)
    fleet.decodes[0].fault = Fault(FaultKind.RESET)
    for _ in range(2):
        answer = await client_of(fleet).completions.create(model="fake", prompt="a", n=2, max_tokens=3)
        assert len(answer.choices) == 2
    await fleet.settled()
    assert fleet.nothing_is_held()


async def test_models(client):
    assert [model.id async for model in client.models.list()] == ["fake"]


async def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="other", prompt="a")


async def test_the_client_tries_again_after_a_429(make_fleet, client_of):
    fleet = await make_fleet(decodes=1, attempts=1)
    fleet.decodes[0].faults.append(Fault(FaultKind.STATUS, status=429))
    client = client_of(fleet, max_retries=1)
    assert (await client.completions.create(model="fake", prompt="a", max_tokens=2)).choices[0].text


async def test_an_error_in_a_stream_is_an_error_of_the_client(fleet, client):
    for engine in fleet.decodes:
        engine.fault = Fault(FaultKind.ERROR_PAYLOAD, after_tokens=2)
    pause = fleet.pause(fleet.decodes, "token")
    stream = await client.completions.create(model="fake", prompt="a", max_tokens=5, stream=True)
    pause.go_on()
    with pytest.raises(openai.APIError, match="engine failed"):
        [chunk async for chunk in stream]


async def test_tokenize_is_answered_by_a_worker_and_its_refusal_passed_on(fleet):
    status, reply = await fleet.complete({"model": "fake", "prompt": "a b c"}, "/tokenize")
    assert (status, reply["count"]) == (200, 3)
    status, reply = await fleet.complete({"prompt": 5}, "/tokenize")
    assert (status, reply["error"]["message"]) == (400, "prompt must be a text")
    status, reply = await fleet.complete({"model": "other", "prompt": "a"}, "/tokenize")
    assert (status, reply["error"]["param"]) == (404, "model")


async def test_tokenize_goes_to_another_worker_where_one_is_down(fleet):
    await fleet.decodes[0].stop()
    for _ in range(3):
        assert (await fleet.complete({"prompt": "a b"}, "/tokenize"))[0] == 200

"""The OpenAI API of the gateway on a real cluster: what one ordinary vLLM server answers, by its official client."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serving_support import MODEL, Served, assert_nothing_is_held, extra_gateway

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

PROMPT = "def quicksort(items):"
MESSAGES = [{"role": "user", "content": PROMPT}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOLS = [{"type": "function", "function": {"name": "sort", "parameters": SCHEMA}}]
NAMED = {"type": "function", "function": {"name": "sort"}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}

COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": PROMPT},
    "stop": {"prompt": PROMPT, "stop": ["e", "a"]},
    "logprobs": {"prompt": PROMPT, "logprobs": 2},
    "min_tokens": {"prompt": PROMPT, "extra_body": {"min_tokens": 6}},
    "token ids": {"prompt": [5, 6, 7, 8, 9, 10]},
    "one prompt in a list": {"prompt": [PROMPT]},
    "structured": {
        "prompt": PROMPT,
        "max_tokens": 40,
        "extra_body": {"structured_outputs": {"json": SCHEMA}},
    },
}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "tools, choice none": {"tools": TOOLS, "tool_choice": "none"},
    "json schema": {"response_format": JSON_SCHEMA, "max_tokens": 40},
    "json object": {"response_format": {"type": "json_object"}, "max_tokens": 40},
}
ORDINARY: dict[str, dict[str, Any]] = {
    "n": {"prompt": PROMPT, "n": 2, "temperature": 0.8, "seed": 5},
    "prompts": {"prompt": [PROMPT, "import"]},
    "echo": {"prompt": PROMPT, "echo": True, "logprobs": 1},
    "prompt_logprobs": {"prompt": PROMPT, "extra_body": {"prompt_logprobs": 1}},
}


@pytest.fixture(scope="module")
def fallback_url(served: Served) -> Iterator[str]:
    """A second gateway of the cluster, with --ordinary-fallback."""
    with extra_gateway(served, "gateway-ordinary", "--ordinary-fallback") as url:
        yield url


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120)


def substance(answer: Any) -> Any:
    """An answer without what differs from one request to the next; log probabilities to two digits."""
    if isinstance(answer, dict):
        passing = ("id", "created", "system_fingerprint", "kv_transfer_params")
        return {name: substance(value) for name, value in answer.items() if name not in passing}
    if isinstance(answer, list):
        return [substance(item) for item in answer]
    return round(answer, 2) if isinstance(answer, float) else answer


def completion(url: str, **asked: Any) -> Any:
    body = {"model": MODEL, "max_tokens": 12, "temperature": 0.0, **asked}
    return substance(client(url).completions.create(**body).model_dump())


def chat(url: str, **asked: Any) -> Any:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0.0, **asked}
    return substance(client(url).chat.completions.create(**body).model_dump())


@pytest.mark.parametrize("asked", COMPLETIONS.values(), ids=COMPLETIONS)
def test_a_completion_is_the_ordinary_servers(served: Served, asked: dict[str, Any]) -> None:
    assert completion(served.gateway_url, **asked) == completion(served.ordinary_url, **asked)


@pytest.mark.parametrize("asked", CHATS.values(), ids=CHATS)
def test_a_chat_is_the_ordinary_servers(served: Served, asked: dict[str, Any]) -> None:
    """Cases 2.14 and 2.32."""
    assert chat(served.gateway_url, **asked) == chat(served.ordinary_url, **asked)


def test_a_refusal_of_vllm_reaches_the_client_as_it_is(served: Served) -> None:
    """These servers have no tool parser."""
    refusals = []
    for url in (served.gateway_url, served.ordinary_url):
        with pytest.raises(openai.BadRequestError) as refusal:
            chat(url, tools=TOOLS, tool_choice=NAMED)
        refusals.append(refusal.value.message)
    assert refusals[0] == refusals[1]


def test_a_stream_has_the_ordinary_servers_chunks_and_usage(served: Served) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0.0, "stream": True}

    def streamed(url: str) -> tuple[str, Any]:
        chunks = list(client(url).completions.create(**asked, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        return text, chunks[-1].usage.model_dump()

    assert streamed(served.gateway_url) == streamed(served.ordinary_url)


@pytest.mark.parametrize("asked", ORDINARY.values(), ids=ORDINARY)
async def test_what_two_legs_cannot_serve_is_refused_or_by_configuration_served_by_one_worker(
    served: Served, fallback_url: str, asked: dict[str, Any]
) -> None:
    """Cases 2.22 and 2.25."""
    with pytest.raises(openai.BadRequestError):
        completion(served.gateway_url, **asked)
    assert completion(fallback_url, **asked) == completion(served.ordinary_url, **asked)
    await assert_nothing_is_held(served)


def test_tokenize_is_a_workers(served: Served) -> None:
    body = {"model": MODEL, "prompt": PROMPT}
    answers = [
        openai.OpenAI(base_url=url, api_key="none").post("/tokenize", body=body, cast_to=object)
        for url in (served.gateway_url, served.ordinary_url)
    ]
    assert answers[0] == answers[1]


def test_vllm_bench_serve_completes_every_request(served: Served, tmp_path: Path) -> None:
    program = (
        "import argparse\n"
        "from vllm.benchmarks.serve import add_cli_args, main\n"
        "parser = argparse.ArgumentParser()\n"
        "add_cli_args(parser)\n"
        "main(parser.parse_args())\n"
    )
    tokenizer = served.fleet.layout.prefill[0].settings.model
    words = (
        *("--base-url", served.gateway_url, "--model", MODEL, "--tokenizer", tokenizer),
        *("--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "8"),
        *("--num-prompts", "12", "--max-concurrency", "4", "--ignore-eos", "--disable-tqdm"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "bench.json"),
    )
    subprocess.run([sys.executable, "-c", program, *words], check=True, timeout=300)
    result = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert (result["completed"], result["failed"]) == (12, 0)
    assert result["total_output_tokens"] == 96

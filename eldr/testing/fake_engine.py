"""A vLLM server without a model: its HTTP behaviour in both legs, its known ways to break, and faults on demand.

    transfers = FakeTransfers()
    async with FakeEngine("p0", transfers) as prefill, FakeEngine("d0", transfers) as decode:
        decode.faults.append(Fault(FaultKind.STATUS, status=503))

Its text is a function of the rendered prompt, the seed and the position, so that both legs together must give
what one engine alone gives. A decoder that is sent to KV that is no longer held gives other text, as a real one
would, and `transfers.stale_pulls` counts it.

A prompt of token ids that an engine of the fleet has given out (`return_token_ids`) is the text it stands for. Ids
of generated tokens may follow, and the text then goes on after them.
"""

import asyncio
import itertools
import json
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from eldr.testing.fake_generation import Generation, render, token_id
from eldr.testing.faults import Fault, FaultKind, Pause
from eldr.testing.request_schema import wrong_field


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request as it arrived. `rendered` is the prompt that the engine would tokenize."""

    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    rendered: str


class FakeTransfers:
    """The KV that prefill engines hold for decoders; shared by the engines of one fleet."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}
        self.prompts: dict[tuple[int, ...], str] = {}
        self.ended: Counter[str] = Counter()
        self.stale_pulls = 0

    def prompt_of(self, ids: list[int]) -> tuple[str, list[int]] | None:
        """The text of token ids that begin with those of a known prompt, and the ids after it."""
        for end in sorted({len(known) for known in self.prompts}, reverse=True):
            text = self.prompts.get(tuple(ids[:end]))
            if text is not None:
                return text, ids[end:]
        return None

    def hold(self, transfer_id: str, rendered: str) -> None:
        """A prompt is complete and waits for a decoder."""
        self.held[transfer_id] = rendered

    def find(self, transfer_id: str) -> str | None:
        """The held transfer of this id, or of the leg with this X-Request-Id."""
        begin = f"cmpl-{transfer_id}-"
        return next((held for held in self.held if held == transfer_id or held.startswith(begin)), None)

    def end(self, transfer_id: str, how: str) -> bool:
        """Frees a transfer; `how` is counted. False when it was not held."""
        held = self.find(transfer_id)
        if held is None:
            return False
        self.ended[how] += 1
        del self.held[held]
        return True


class FakeEngine:
    """One fake server on 127.0.0.1. Which leg a request is, its kv_transfer_params say, as in vLLM.

    A refused decode leg frees its hand-off, as vLLM's HTTP layer does, unless `frees_refused` is off.
    `faults` are used up one a request, `fault` holds for every other one. `pauses` maps "accepted" (before any
    byte of the answer), "prefilled" (KV held, not yet answered), "headers" (stream begun, no event yet) or "token"
    (after the first event) to a Pause. `texts` are tokens of its output by position; `stops_at` is the position of
    an end token.
    """

    def __init__(
        self, worker_id: str, transfers: FakeTransfers, *, model: str = "fake", max_model_len: int = 4096
    ) -> None:
        self.worker_id = worker_id
        self.transfers = transfers
        self.model = model
        self.max_model_len = max_model_len
        self.signature: Callable[[str], str | None] = lambda rendered: None
        self.frees_refused = True
        self.faults: deque[Fault] = deque()
        self.fault: Fault | None = None
        self.pauses: dict[str, Pause] = {}
        self.texts: dict[int, str] = {}
        self.stops_at: int | None = None
        self.created = 1
        self.requests: list[SeenRequest] = []
        self.running: set[str] = set()
        self.finished = 0
        self.aborted = 0
        self.crashed = ""
        self._ids = itertools.count()
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """http://127.0.0.1:port."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listens, on the same port again after a stop. vLLM's server closes idle connections after 5 s."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, keepalive_timeout=5.0, shutdown_timeout=0.01
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Closes every connection."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=500 if self.crashed else 200)

    async def _models(self, _request: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not isinstance(body.get("prompt"), str):
            return _error(400, "prompt must be a text")
        words = body["prompt"].split()
        tokens = [token_id(word) for word in words]
        return web.json_response({"count": len(words), "tokens": tokens, "max_model_len": self.max_model_len})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        wrong = wrong_field(request.path, body)
        if wrong:
            return _error(400, f"{wrong} is not what it must be")
        made = Generation(
            path=request.path,
            body=body,
            rendered=render(request.path, body),
            request_id=request.headers.get("X-Request-Id") or f"{self.worker_id}-{next(self._ids)}",
            fault=self.faults.popleft() if self.faults else self.fault,
        )
        self.requests.append(SeenRequest(request.path, request.headers, body, made.rendered))
        prompt = body.get("prompt")
        known = self.transfers.prompt_of(prompt) if isinstance(prompt, list) else None
        if known:
            made.rendered, made.history = known
        self._break_where_vllm_does(made)
        self.running.add(made.request_id)
        try:
            response = await self._answer(request, made)
            self.finished += 1
            return response
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted += 1
            raise
        finally:
            self.running.discard(made.request_id)

    def _break_where_vllm_does(self, made: Generation) -> None:
        """Requests that have taken real engines down (cases 2.15, 2.22, 2.25): the gateway must not send them."""
        pulls = bool((made.body.get("kv_transfer_params") or {}).get("do_remote_prefill"))
        if made.request_id in self.running:
            self.crashed = f"duplicate request id {made.request_id}"
        elif pulls and (made.body.get("echo") or made.body.get("prompt_logprobs") is not None):
            self.crashed = "prompt logprobs of a prompt that was not computed here"
        elif pulls and (made.body.get("n") or 1) > 1:
            self.crashed = "one hand-off for several sequences"

    async def _answer(self, request: web.Request, made: Generation) -> web.StreamResponse:
        await self._pause("accepted")
        kind = made.fault.kind if made.fault else None
        if self.crashed or kind is FaultKind.RESET:
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError(self.crashed or "made to reset")
        if kind is FaultKind.HANG:
            await asyncio.Event().wait()
        params = made.body.get("kv_transfer_params") or {}
        problem = self._refusal(made)
        if problem:
            if params.get("do_remote_prefill") and self.frees_refused:
                self.transfers.end(params["remote_request_id"], "refused")
            return problem
        if params.get("do_remote_prefill"):
            self._pull(made, params)
        made.tokens = self._tokens(made)
        if made.body.get("stream"):
            return await self._stream(request, made)
        return await self._json(request, made, prefill=bool(params.get("do_remote_decode")))

    def _refusal(self, made: Generation) -> web.Response | None:
        """The fault, or vLLM's own checks that a careless prefill leg runs into."""
        if made.fault and made.fault.kind is FaultKind.STATUS:
            return _error(made.fault.status, made.fault.message)
        body, prompt_tokens = made.body, made.prompt_tokens
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 1
        if body.get("min_tokens", 0) > limit:
            return _error(400, f"min_tokens must be at most max_tokens={limit}, got {body['min_tokens']}.")
        if body.get("stream_options") and not body.get("stream"):
            return _error(400, "Stream options can only be defined when `stream=True`.")
        if body.get("model") not in (None, "", self.model):
            return _error(404, f"The model `{body['model']}` does not exist.", "NotFoundError")
        if prompt_tokens + limit > self.max_model_len:
            return _error(400, f"This model's maximum context length is {self.max_model_len} tokens.")
        forced = body.get("tool_choice") not in (None, "auto", "none")
        if limit == 1 and (forced or body.get("response_format") or body.get("structured_outputs")):
            return _error(500, "one token is no tool call and no JSON", "InternalServerError")
        return None

    def _pull(self, made: Generation, params: Mapping[str, Any]) -> None:
        """Takes the prompt over from the prefill engine; what is no longer held is somebody else's by now."""
        rendered = self.transfers.held.get(params["remote_request_id"])
        if rendered is None:
            self.transfers.stale_pulls += 1
            made.rendered = "another prompt's KV"
            return
        self.transfers.end(params["remote_request_id"], "pulled")
        made.rendered = rendered

    def _tokens(self, made: Generation) -> list[str]:
        """The output after `history`; one that this engine would not have made leads elsewhere."""
        begun = len(made.history)
        if made.history != [token_id(self._token(made, index)) for index in range(begun)]:
            made.rendered = "another history"
        limit = begun + (made.body.get("max_completion_tokens") or made.body.get("max_tokens") or 16)
        if self.stops_at is not None and begun + made.body.get("min_tokens", 0) <= self.stops_at < limit:
            limit, made.finish = self.stops_at + 1, "stop"
        tokens = [self._token(made, index) for index in range(begun, limit)]
        return [*tokens[:-1], ""] if made.finish == "stop" else tokens

    def _token(self, made: Generation, index: int) -> str:
        return self.texts[index] if index in self.texts else made.token(index)

    async def _json(self, request: web.Request, made: Generation, prefill: bool) -> web.StreamResponse:
        kind = made.fault.kind if made.fault else None
        if kind is FaultKind.ERROR_PAYLOAD:
            return web.json_response({"error": {"message": "engine failed", "type": "InternalServerError"}})
        finish = "error" if kind is FaultKind.ERROR_FINISH else made.finish
        text = "" if kind is FaultKind.ERROR_FINISH else "".join(made.tokens)
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "stop_reason": None}
        choice |= {"message": {"role": "assistant", "content": text}} if made.chat else {"text": text}
        if not made.chat:
            choice |= self._shown_ids(made, made.tokens, with_prompt=True)
        reply: dict[str, Any] = {
            "id": f"cmpl-{made.request_id}",
            "object": "chat.completion" if made.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [{**choice, "index": index} for index in range(made.copies)],
            "usage": made.usage(len(made.tokens) * made.copies),
            "kv_transfer_params": None,
        }
        if made.chat and made.body.get("return_token_ids"):
            reply["prompt_token_ids"] = list(range(made.prompt_tokens))
        if prefill and kind is not FaultKind.NO_HANDOFF:
            reply["kv_transfer_params"] = self._hold(made)
            await self._pause("prefilled")
        if kind is FaultKind.CUT:
            return await self._break_off(request, json.dumps(reply).encode())
        return web.json_response(reply)

    def _shown_ids(self, made: Generation, tokens: list[str], with_prompt: bool) -> dict[str, Any]:
        """Token ids of a completion's choice, null where the client does not ask for them."""
        if not made.body.get("return_token_ids"):
            return {"prompt_token_ids": None, "token_ids": None}
        prompt = [token_id(word) for word in made.rendered.split()]
        self.transfers.prompts[tuple(prompt)] = made.rendered
        return {
            "prompt_token_ids": prompt + made.history if with_prompt else None,
            "token_ids": [token_id(token) for token in tokens],
        }

    def _hold(self, made: Generation) -> dict[str, Any]:
        transfer_id = f"cmpl-{made.request_id}-{next(self._ids):08x}"
        self.transfers.hold(transfer_id, made.rendered)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": self.worker_id,
            "remote_request_id": transfer_id,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "remote_num_tokens": made.prompt_tokens,
            "tp_size": 1,
            "eldr_signature": self.signature(made.rendered),
        }

    async def _break_off(self, request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = len(data)
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        assert request.transport is not None
        request.transport.abort()
        return response

    async def _stream(self, request: web.Request, made: Generation) -> web.StreamResponse:
        fault = made.fault or Fault(FaultKind.STATUS, after_tokens=1 << 30)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await self._pause("headers")
        for index, token in enumerate(made.tokens):
            if index == fault.after_tokens:
                await self._fail_in_stream(response, made, fault)
                return response
            last = index + 1 == len(made.tokens)
            for copy in range(made.copies):
                chunk = self._chunk(made, index, token, made.finish if last else None)
                chunk["choices"][0]["index"] = copy
                await _event(response, chunk)
            if index == 0:
                await self._pause("token")
        if (made.body.get("stream_options") or {}).get("include_usage"):
            chunk = self._chunk(made, len(made.tokens), "", None)
            await _event(response, {**chunk, "choices": [], "usage": made.usage(len(made.tokens))})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _fail_in_stream(self, response: web.StreamResponse, made: Generation, fault: Fault) -> None:
        if fault.kind is FaultKind.STALL:
            await asyncio.Event().wait()
        if fault.kind is FaultKind.CUT:
            return
        if fault.kind is FaultKind.ERROR_FINISH:
            await _event(response, self._chunk(made, len(made.tokens), "", "error"))
        else:
            await _event(response, {"error": {"message": "engine failed", "type": "InternalServerError"}})
        await response.write(b"data: [DONE]\n\n")

    def _chunk(self, made: Generation, index: int, token: str, finish: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0}
        choice |= {"delta": {"content": token}} if made.chat else {"text": token}
        choice |= {"logprobs": None, "finish_reason": finish, "stop_reason": None}
        if not made.chat:
            choice |= self._shown_ids(made, [token], with_prompt=index == 0)
        chunk: dict[str, Any] = {
            "id": f"cmpl-{made.request_id}",
            "object": "chat.completion.chunk" if made.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }
        if (made.body.get("stream_options") or {}).get("continuous_usage_stats"):
            chunk["usage"] = made.usage(index + 1)
        return chunk

    async def _pause(self, point: str) -> None:
        if point in self.pauses:
            await self.pauses[point].wait_here()


def _error(status: int, message: str, kind: str = "BadRequestError") -> web.Response:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


async def _event(response: web.StreamResponse, chunk: Mapping[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n")

"""Workers that answer like vLLM with the eldr connector, with counts that follow from the prompt."""

from dataclasses import dataclass, field

import numpy as np
from aiohttp import web

from eldr.rpc.codec import signature_to_text
from eldr.signature import ExpertSignature

LAYERS, EXPERTS, TOP_K = 2, 8, 2


def counts_of(seed, tokens):
    """Counts of `tokens` tokens, [layers, experts], every layer summing to tokens * top_k."""
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, EXPERTS, (LAYERS, tokens * TOP_K))
    return np.stack([np.bincount(row, minlength=EXPERTS) for row in picks])


def signature(seed, tokens, fingerprint="f"):
    return ExpertSignature(fingerprint, TOP_K, tokens, tokens, counts_of(seed, tokens))


@dataclass
class FakeWorker:
    """Serves both legs. `tamper` may change a reply before it is sent; `bodies` are the requests it saw."""

    fingerprint: str = "f"
    bodies: list = field(default_factory=list)
    busy: int = 0
    most_busy: int = 0
    tamper: object = None
    barrier: object = None
    url: str = ""

    async def completions(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        if self.barrier is not None:
            await self.barrier.wait()
        self.busy -= 1
        params = body["kv_transfer_params"]
        prompt = body["prompt"]
        if params.get("do_remote_decode") or params.get("eldr_signature"):
            text = signature_to_text(signature(len(prompt), len(prompt), self.fingerprint))
            params = {"remote_request_id": prompt, "do_remote_prefill": True, "eldr_signature": text}
            generated = 1
        else:
            generated = body["max_tokens"]
            text = signature_to_text(signature(len(prompt), generated - 1, self.fingerprint))
            params = {"eldr_decode_signature": text} if params.get("eldr_decode_counts") else None
        reply = {
            "choices": [{"text": "t", "prompt_token_ids": [1] * len(prompt)}],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": generated},
            "kv_transfer_params": params,
        }
        return web.json_response(self.tamper(body, reply) if self.tamper else reply)

    async def models(self, _request):
        return web.json_response({"data": [{"id": "served"}]})

    def app(self):
        app = web.Application()
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/v1/models", self.models)
        return app

"""Routes that any worker of a model answers alike, passed on to one of them: no booking, no hand-off."""

import asyncio
import itertools
import json
from collections.abc import Mapping
from contextlib import ExitStack

from eldr.client import WorkerHealth, WorkerRef, WorkerStatus
from eldr.gateway.big_bodies import BIG_BODY_BYTES
from eldr.gateway.bookings import Router
from eldr.gateway.course import Answer
from eldr.gateway.engine_client import EngineClient, read_all
from eldr.gateway.errors import GatewayError, LegError, WorkerRefusalError, unavailable
from eldr.gateway.guard import Guard
from eldr.gateway.settings import GatewaySettings
from eldr.gateway.watch import Watch

PASSED_ROUTES = ("/tokenize", "/detokenize")


class PassOn:
    """Asks the workers in turn."""

    def __init__(
        self, engines: EngineClient, router: Router, settings: GatewaySettings, guard: Guard, watch: Watch
    ) -> None:
        self._engines = engines
        self._router = router
        self._settings = settings
        self._guard = guard
        self._watch = watch
        self._turns = itertools.count()

    async def answer(self, path: str, raw: bytes, headers: Mapping[str, str]) -> Answer:
        """The answer of one worker, its 4xx included. Raises GatewayError, and RouterError."""
        big = len(raw) >= BIG_BODY_BYTES
        model = await asyncio.to_thread(_model_of, raw) if big else _model_of(raw)
        failure: LegError | None = None
        for worker in self._in_turn(await self._router.workers(), model)[: self._settings.attempts]:
            try:
                return await self._ask(worker, path, raw, headers)
            except WorkerRefusalError as refusal:
                return Answer(refusal.status, refusal.content_type, {}, refusal.body)
            except LegError as error:
                if not error.retryable:
                    raise error.as_gateway_error() from error
                failure = error
        raise failure.as_gateway_error() if failure else unavailable("no live worker can answer")

    def _in_turn(self, workers: list[WorkerStatus], model: str) -> list[WorkerStatus]:
        serving = [worker for worker in workers if model in ("", worker.info.served_model)]
        if workers and not serving:
            raise GatewayError(404, f"the model {model!r} is not served", param="model")
        excluded = self._guard.excluded(())
        well = [
            worker
            for worker in serving
            if worker.health is WorkerHealth.LIVE and worker.info.worker_id not in excluded
        ]
        turn = next(self._turns) % len(well) if well else 0
        return well[turn:] + well[:turn]

    async def _ask(self, status: WorkerStatus, path: str, raw: bytes, headers: Mapping[str, str]) -> Answer:
        info = status.info
        worker = WorkerRef(info.worker_id, info.incarnation, info.http_url, info.grpc_address)
        with ExitStack() as held, self._guard.leg(held, worker, info.role) as ticket:
            async with self._watch.limit(worker, self._settings.prefill_timeout_s, path):
                response = await self._engines.post(
                    worker, path, raw, headers, self._settings.connect_timeout_s
                )
                held.callback(response.close)
                body = await read_all(worker.worker_id, response)
            ticket.succeeded()
        return Answer(response.status, response.content_type, {}, body)


def _model_of(raw: bytes) -> str:
    """The model that a body names; what is wrong with the body the worker says."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return ""
    model = body.get("model") if isinstance(body, dict) else None
    return model if isinstance(model, str) else ""

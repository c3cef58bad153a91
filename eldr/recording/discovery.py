"""Where the workers of a calibration are: asked of a router, of the workers' own gRPC services, or given as URLs."""

from collections.abc import Sequence

import aiohttp

from eldr.client import (
    CodecError,
    RouterClient,
    WorkerClient,
    WorkerError,
    WorkerHealth,
    WorkerInfo,
    WorkerRole,
)
from eldr.recording.recorder import RecordError, Targets

_ALIKE = ("served_model", "geometry", "block_size", "kv_layout")


async def targets_of_router(address: str, model: str | None) -> Targets:
    """The live workers of a router. Raises RouterError, CodecError, and RecordError where a leg has none.

    Also where they serve several models and none is named.
    """
    async with RouterClient(address) as client:
        workers = [worker for worker in await client.workers() if worker.health is WorkerHealth.LIVE]
    infos = [worker.info for worker in workers if model in (None, worker.info.served_model)]
    for role in WorkerRole:
        if not any(info.role is role for info in infos):
            raise RecordError(
                f"router {address} has no live {role} worker" + (f" of {model!r}" if model else "")
            )
    models = sorted({info.served_model for info in infos})
    if len(models) > 1:
        raise RecordError(f"router {address} has workers of {', '.join(models)}; choose with --model")
    one = _one_model(infos)
    prefill, decode = (
        tuple(info.http_url for info in infos if info.role is role)
        for role in (WorkerRole.PREFILL, WorkerRole.DECODE)
    )
    return Targets(prefill, decode, one.served_model, one.geometry.moe_layers)


async def targets_of_workers(prefill: Sequence[str], decode: Sequence[str], model: str | None) -> Targets:
    """Workers by host:port of their gRPC services, or by the URL of their HTTP servers.

    Only a gRPC service names the indices of the MoE layers; with URLs alone they are taken to be 0, 1, ...
    Raises RecordError where a worker is of the other leg, of another model, or cannot be reached.
    """
    infos: list[WorkerInfo] = []
    urls: dict[WorkerRole, list[str]] = {role: [] for role in WorkerRole}
    for role, given in ((WorkerRole.PREFILL, prefill), (WorkerRole.DECODE, decode)):
        for place in given:
            if "://" in place:
                urls[role].append(place)
                continue
            info = await _info_of(place)
            if info.role is not role:
                raise RecordError(f"worker {place} is a {info.role} worker, given as a {role} worker")
            infos.append(info)
            urls[role].append(info.http_url)
    places = (tuple(urls[WorkerRole.PREFILL]), tuple(urls[WorkerRole.DECODE]))
    if not infos:
        return Targets(*places, model or await served_model(prefill[0]))
    one = _one_model(infos)
    if model not in (None, one.served_model):
        raise RecordError(f"worker {one.grpc_address} serves {one.served_model!r}, not {model!r}")
    return Targets(*places, one.served_model, one.geometry.moe_layers)


def _one_model(infos: Sequence[WorkerInfo]) -> WorkerInfo:
    """The first of workers that can serve one request together. Raises RecordError with both values."""
    first = infos[0]
    for info in infos[1:]:
        for name in _ALIKE:
            mine, theirs = getattr(first, name), getattr(info, name)
            if mine != theirs:
                raise RecordError(
                    f"worker {info.worker_id} has {name} {theirs!r}, worker {first.worker_id} has {mine!r}"
                )
    return first


async def _info_of(address: str) -> WorkerInfo:
    try:
        async with WorkerClient(address) as client:
            return await client.get_info()
    except (WorkerError, CodecError) as error:
        raise RecordError(str(error)) from error


async def served_model(url: str) -> str:
    """The first model that a worker serves. Raises RecordError where it does not say."""
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(url.rstrip("/") + "/v1/models") as response,
        ):
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, ValueError, LookupError) as error:
        raise RecordError(f"prefill worker {url} does not name its model ({error}); give --model") from error

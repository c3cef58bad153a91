"""NIXL's own tables and threads, which eldr reaches without a patch."""

import importlib
from collections.abc import Callable
from typing import Any

import structlog
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector

log = structlog.get_logger()


def nixl_schedulers(connector: Any) -> list[Any]:
    """Scheduler sides of the NIXL connectors in `connector`: its own, or those behind a MultiConnector."""
    if isinstance(connector, NixlBaseConnector):
        return [connector.connector_scheduler]
    return [side for child in getattr(connector, "sub_connectors", ()) for side in nixl_schedulers(child)]


def nixl_workers(connector: Any) -> list[Any]:
    """Worker sides of the NIXL connectors in `connector`, as `nixl_schedulers`."""
    if isinstance(connector, NixlBaseConnector):
        return [connector.connector_worker]
    return [side for child in getattr(connector, "sub_connectors", ()) for side in nixl_workers(child)]


def note_expired(connector: Any, note: Callable[[set[str]], None]) -> None:
    """Calls `note` with the transfers whose leases the workers end, as opposed to those that a decoder has read."""
    for worker in nixl_workers(connector):
        worker._reap_expired_send_leases = _noting(worker._reap_expired_send_leases, note)


def _noting(reap: Callable[[set[str]], None], note: Callable[[set[str]], None]) -> Callable[[set[str]], None]:
    def noting(done_sending: set[str]) -> None:
        expired: set[str] = set()
        reap(expired)
        done_sending |= expired
        note(expired)

    return noting


def expire_lease(connector: Any, request_id: str) -> None:
    """Has the workers free a held transfer in the next step: a lease that has run out is what NIXL releases."""
    for scheduler in nixl_schedulers(connector):
        scheduler._reqs_need_send[request_id] = float("-inf")


def spare_cores(connector_class: type, transfer: KVTransferConfig, delay_us: int) -> None:
    """Keeps the NIXL agents that `transfer` asks for from spinning a core each; no effect without NIXL.

    `delay_us` as for `set_progress_delay`.
    """
    own = transfer.kv_connector_extra_config
    if issubclass(connector_class, NixlBaseConnector):
        extras = [own]
    else:
        children = [child for child in own.get("connectors", ()) if "Nixl" in child.get("kv_connector", "")]
        extras = [child.setdefault("kv_connector_extra_config", {}) for child in children]
    for extra in extras:
        extra.setdefault("num_threads", 0)
    if extras:
        set_progress_delay(delay_us)


def set_progress_delay(delay_us: int) -> bool:
    """Makes agents created from now on pause `delay_us` between two polls of their progress thread.

    NIXL's Python API always asks for no pause at all, so an idle worker keeps a core busy. Returns False
    where NIXL is not installed.
    """
    try:
        api = importlib.import_module("nixl._api")
    except ImportError:
        return False
    base = getattr(api.nixlBind.nixlAgentConfig, "_eldr_base", api.nixlBind.nixlAgentConfig)

    class PausingAgentConfig(base):  # type: ignore[misc, valid-type]
        _eldr_base = base

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, delay_us if name == "pthrDelay" else value)

    api.nixlBind.nixlAgentConfig = PausingAgentConfig
    log.info("nixl_progress_delay_set", delay_us=delay_us)
    return True

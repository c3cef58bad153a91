"""Keeps NIXL's progress thread from spinning a core. A seam, no patch: NIXL's own agent configuration."""

import importlib

import structlog

log = structlog.get_logger()


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

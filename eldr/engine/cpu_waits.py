"""How the processes of an engine on CPUs wait for one another, reached without a patch."""

import time

NAP_S = 1e-4
"""How long a waiting process sleeps before it looks again; a step of a small model takes 100 times as long."""


def nap() -> None:
    """Leaves the core to others for NAP_S."""
    time.sleep(NAP_S)


def register() -> None:
    """Lets vLLM's processes sleep while they wait for one another, instead of calling `sched_yield` in a loop.

    Scheduler and worker of an engine hand steps over through shared memory, and each asks for the next message
    without pause for a second after the last. Beside a GPU that costs a spare core; on CPUs it takes those that
    compute. vLLM calls this in every process (`vllm.general_plugins`).
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators import shm_broadcast

    if not callable(getattr(shm_broadcast, "sched_yield", None)):
        raise RuntimeError("this vLLM waits in another way; eldr knows how 0.32.0 does")
    shm_broadcast.sched_yield = nap

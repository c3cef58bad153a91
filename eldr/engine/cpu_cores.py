"""What keeps the engines of one machine from computing on the same core, reached without a patch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def affinity_kept() -> Iterator[None]:
    """Gives the calling thread its cores back afterwards.

    vLLM's NIXL worker binds the thread that makes it to the last core of the machine, so that loads run beside
    the model's OpenMP threads. But that thread is itself the first of them: with one thread per engine, all
    engines of a machine would compute on that core, whatever VLLM_CPU_OMP_THREADS_BIND says. Threads that are
    started inside, such as those that receive, keep the last core.
    """
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)

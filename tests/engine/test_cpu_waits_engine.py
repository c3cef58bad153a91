"""How a waiting process of an engine on CPUs spends its time, on vLLM's own queue."""

import time

import pytest

pytestmark = pytest.mark.engine


def test_vllm_loads_the_plugin_in_every_process() -> None:
    from vllm.plugins import load_plugins_by_group

    from eldr.engine.cpu_waits import register

    assert load_plugins_by_group("vllm.general_plugins")["eldr_cpu_waits"] is register


def test_a_reader_that_waits_for_a_message_leaves_the_core_to_others() -> None:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    from eldr.engine.cpu_waits import register

    register()
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    writer.enqueue("step")
    # From here on, for a second, vLLM's reader asks again and again.
    assert reader.dequeue(timeout=5) == "step"
    began, computed = time.monotonic(), time.thread_time()
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.5)
    assert time.thread_time() - computed < 0.5 * (time.monotonic() - began)


def test_another_vllm_that_waits_in_another_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    from eldr.engine.cpu_waits import register

    monkeypatch.delattr(shm_broadcast, "sched_yield")
    with pytest.raises(RuntimeError, match=r"0\.32\.0"):
        register()

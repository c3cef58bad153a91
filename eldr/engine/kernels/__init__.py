"""The reduction of a step's picks: one contract, a numpy implementation for CPUs and a Triton one for GPUs."""

from eldr.engine.kernels.contract import StepReducer
from eldr.engine.signature_cache import SignatureCache


def reducer_for(
    device_type: str, layers: int, experts: int, top_k: int, cache: SignatureCache | None
) -> StepReducer:
    """The implementation for a device. The kernel is compiled when this returns, so that no step pays for it.

    cache: rows that the reducer writes and sums; None on workers that keep none.
    """
    if device_type == "cpu":
        from eldr.engine.kernels.vectorised import VectorReducer

        return VectorReducer(layers, experts, top_k, cache)
    from eldr.engine.kernels.device import DeviceReducer
    from eldr.engine.kernels.link import StreamLink

    return DeviceReducer(layers, experts, top_k, cache, StreamLink(device_type))

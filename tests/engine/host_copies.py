"""Host memory for OffloadingConnector on a CPU engine, whose own spec moves bytes with CUDA or XPU streams only.

Everything but the copy itself is vLLM's. Named in a connector's extra config:
`"spec_name": "HostCopiesSpec", "spec_module_path": "host_copies"`.
"""

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostCopies(OffloadingWorker):  # type: ignore[misc]
    """Copies whole blocks at once; a transfer is over when it was submitted."""

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        self._pairs = [
            (cache.tensor, torch.zeros((chunks, cache.page_size_bytes), dtype=torch.int8))
            for cache in kv_caches.tensors
        ]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for blocks, host in self._pairs:
            host[dst_spec.block_ids] = blocks[src_spec.block_ids]
        return self._end(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for blocks, host in self._pairs:
            blocks[dst_spec.block_ids] = host[src_spec.block_ids]
        return self._end(job_id)

    def _end(self, job_id: int) -> bool:
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""


class HostCopiesSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """One chunk is one block."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> HostCopies:
        assert self.blocks_per_chunk == 1
        if not self._worker:
            self._worker = HostCopies(kv_caches, self.num_chunks)
        return self._worker

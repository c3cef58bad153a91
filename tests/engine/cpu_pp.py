"""Test-only: pipeline parallelism on vLLM's CPU build without compilation.

Stages after the first allocate what they receive in the warm-up pass, which the CPU worker leaves out in eager
mode. `worker_cls="cpu_pp.PipelineWorker"`.
"""

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class PipelineWorker(CPUWorker):
    """Allocates the buffers of received activations when the model is there."""

    def load_model(self, **options: object) -> None:
        super().load_model(**options)
        if not get_pp_group().is_first_rank:
            runner = self.model_runner
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )

"""What a worker says of itself; field meanings as in `protos/eldr/v1/worker.proto`."""

from dataclasses import dataclass
from enum import StrEnum

from eldr.signature.geometry import ModelGeometry


class WorkerRole(StrEnum):
    """Leg of a request that the worker serves."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Identity and addresses of one worker. Raises ValueError where a field makes no sense."""

    worker_id: str
    incarnation: str
    role: WorkerRole
    http_url: str
    grpc_address: str
    geometry: ModelGeometry
    served_model: str
    block_size: int
    engine_version: str = ""
    max_model_len: int = 0
    max_num_seqs: int = 0
    kv_layout: str = ""
    hit_window_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("worker_id", "incarnation", "grpc_address", "served_model"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        if not self.http_url.startswith(("http://", "https://")):
            raise ValueError(f"http_url must start with http:// or https://, got {self.http_url!r}")
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")

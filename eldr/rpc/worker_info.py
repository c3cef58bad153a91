"""What a worker says of itself; field meanings as in `protos/eldr/v1/worker.proto`."""

import re
from dataclasses import dataclass
from enum import StrEnum

from eldr.signature.geometry import ModelGeometry

MAX_TEXT_CHARACTERS = 1024

# No user, query or fragment, and no scheme of gRPC's but host:port, so that what is checked is what is dialled.
_HOST = r"(?:[A-Za-z0-9][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\])"
_GRPC_ADDRESS = re.compile(rf"{_HOST}:(\d{{1,5}})")
_HTTP_URL = re.compile(rf"https?://{_HOST}(?::(\d{{1,5}}))?(?:/[A-Za-z0-9._~/-]*)?")


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
        for name in ("worker_id", "incarnation", "served_model", "engine_version", "kv_layout"):
            text = getattr(self, name)
            if len(text) > MAX_TEXT_CHARACTERS or not text.isprintable():
                raise ValueError(
                    f"{name} must have at most {MAX_TEXT_CHARACTERS} printable characters, got {text[:40]!r}"
                )
        if not self.http_url.startswith(("http://", "https://")):
            raise ValueError(f"http_url must start with http:// or https://, got {self.http_url[:80]!r}")
        if not _is_address(_HTTP_URL, self.http_url):
            raise ValueError(
                f"http_url must be http://host:port or https://host:port, got {self.http_url[:80]!r}"
            )
        if not _is_address(_GRPC_ADDRESS, self.grpc_address):
            raise ValueError(f"grpc_address must be host:port, got {self.grpc_address[:80]!r}")
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")


def _is_address(form: re.Pattern[str], text: str) -> bool:
    found = form.fullmatch(text)
    return found is not None and (found[1] is None or 0 < int(found[1]) < 1 << 16)

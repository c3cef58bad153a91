"""The running cluster of a module, and what its tests read from it."""

from dataclasses import dataclass

from eldr.cluster.local import LocalFleet

MODEL = "m"


@dataclass(frozen=True)
class Served:
    """A running cluster. `ordinary_url` is one vLLM server with the same model and no connector."""

    fleet: LocalFleet
    gateway_url: str
    router: str
    ordinary_url: str

    @property
    def prefill_grpc(self) -> str:
        return self.fleet.layout.prefill[0].grpc_address

    @property
    def decode_urls(self) -> list[str]:
        return [server.http_url for server in self.fleet.layout.decode]


def metric(text: str, name: str, **labels: str) -> float:
    """Sum of a Prometheus counter over the label sets that hold `labels`."""
    total = 0.0
    for line in text.splitlines():
        if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            total += float(line.rpartition(" ")[2])
    return total

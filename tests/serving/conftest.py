"""One real cluster per module: prefill and decode servers, router, gateway, and an ordinary server beside them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving_support import MODEL, Served

from eldr.cluster.local import FleetConfig, LocalFleet
from eldr.cluster.ports import free_ports
from eldr.cluster.readiness import http_ready
from eldr.cluster.vllm_server import EngineSettings, Leg, VllmServer

TESTBED = Path(__file__).resolve().parents[2] / "integration/testbed"
LEASE_S = 6


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """1 prefill and 2 decode servers of 16 run slots each; leases of 6 s, so that a test can outlast one."""
    engine = EngineSettings(
        model=str(TESTBED / "model"), served_name=MODEL, max_model_len=768, max_num_seqs=16, kv_cache_mib=64
    )
    config = FleetConfig(engine=engine, prefill=1, decode=2, connector_config={"kv_lease_duration": LEASE_S})
    with LocalFleet(config, tmp_path_factory.mktemp("logs"), print) as fleet:
        router = fleet.start_router()
        ordinary = VllmServer(
            "ordinary",
            Leg.WHOLE,
            engine,
            http_port=free_ports(1)[0],
            core=1,
            # Every prompt in one step: a seeded prompt that is prefilled in chunks kills vLLM 0.32.0 on a CPU.
            extra_args=(f"--max-num-batched-tokens={engine.max_num_seqs * engine.max_model_len}",),
        )
        fleet.supervisor.start(ordinary.command())
        fleet.start_servers()
        fleet.supervisor.wait_ready("ordinary", http_ready(f"{ordinary.http_url}/health"), 300)
        yield Served(fleet, fleet.start_gateway(), router, ordinary.http_url)


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Evaluation prompts of all domains, in file order, cut to a few hundred characters."""
    lines = (TESTBED / "prompts/evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"][:500] for line in lines]


@pytest.fixture(scope="module")
def profile(served: Served, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A profile calibrated on the cluster and fitted by the product's own verbs."""
    folder = tmp_path_factory.mktemp("profile")
    counts, fitted = folder / "counts.npz", folder / "fleet.profile"
    prompts = folder / "prompts.jsonl"
    lines = (TESTBED / "prompts/calibration.jsonl").read_text(encoding="utf-8").splitlines()[:80]
    prompts.write_text("\n".join(lines), encoding="utf-8")
    eldr = [sys.executable, "-m", "eldr.cli.main"]
    calibrate = ["calibrate", str(prompts), "--out", str(counts), "--router", served.router]
    subprocess.run([*eldr, *calibrate, "--output-tokens", "16"], check=True, timeout=300)
    subprocess.run([*eldr, "fit", str(counts), "-k", "2", "--out", str(fitted)], check=True, timeout=300)
    return fitted.read_bytes()

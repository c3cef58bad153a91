"""One suite for the implementations of `fewest-activated`, against the NumPy reference.

The last test runs this file in Triton's interpreter, in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from eldr.engine.kernels.replica_choice import HostChoice, ReplicaChoice
from eldr.placement import PLANNERS, Demand, Geometry, PlanSettings, Replicas, choose_fewest_activated, plan

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

both = pytest.mark.parametrize(
    "kind",
    [
        pytest.param("host", marks=pytest.mark.engine),
        pytest.param("triton", marks=pytest.mark.engine if INTERPRETED else pytest.mark.gpu),
    ],
)


def choice_of(kind: str, row: np.ndarray, geometry: Geometry) -> ReplicaChoice:
    replicas = Replicas.of(row, geometry.experts)
    if kind == "host":
        return HostChoice(replicas, geometry)
    from eldr.engine.kernels.replica_choice_triton import DeviceChoice

    return DeviceChoice(replicas, geometry, torch.device(DEVICE))


def place(kind: str, ids: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(ids).to("cpu" if kind == "host" else DEVICE)


@both
@pytest.mark.parametrize("planner", sorted(PLANNERS))
@pytest.mark.parametrize(("experts", "ranks", "slots"), [(12, 4, 20), (33, 3, 36), (16, 8, 40), (8, 2, 8)])
def test_every_implementation_equals_the_reference(
    kind: str, planner: str, experts: int, ranks: int, slots: int
) -> None:
    rng = np.random.default_rng(slots)
    geometry = Geometry(experts, ranks, slots)
    row = plan(Demand(rng.random((1, experts))), geometry, PlanSettings(planner)).maps[0]
    choice = choice_of(kind, row, geometry)
    for tokens, dtype in ((1, np.int32), (5, np.int64), (9, np.int32), (40, np.int64), (0, np.int32)):
        ids = rng.random((tokens, experts)).argsort(axis=1)[:, :3].astype(dtype)
        found = choice(place(kind, ids))
        assert found.shape == ids.shape
        expected = choose_fewest_activated(ids.astype(np.int64), Replicas.of(row, experts), geometry)
        np.testing.assert_array_equal(found.cpu().numpy(), expected)


@both
def test_padding_gets_no_slot_and_the_next_step_knows_nothing_of_it(kind: str) -> None:
    geometry = Geometry(12, 4, 20)
    row = plan(Demand(np.random.default_rng(0).random((1, 12))), geometry).maps[0]
    choice, replicas = choice_of(kind, row, geometry), Replicas.of(row, 12)
    for ids in ([[0, 5, -1], [-1, -1, -1], [12, 7, 255]], [[1, 2, 15]], [[3, 4, 5]]):
        picks = np.array(ids, dtype=np.int32)
        expected = choose_fewest_activated(picks.astype(np.int64), replicas, geometry)
        np.testing.assert_array_equal(choice(place(kind, picks)).cpu().numpy(), expected)


if not INTERPRETED:

    @pytest.mark.engine
    @pytest.mark.timeout(300)
    def test_the_suite_passes_in_tritons_interpreter() -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "engine", "-k", "triton", __file__]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider"],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert " passed" in done.stdout

"""The process that holds a described fleet: it starts all, says how far it is in a state file, ends all."""

import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import FrameType

from eldr.cluster.description import Description
from eldr.cluster.errors import ClusterError
from eldr.cluster.local import LocalFleet

STATE_FILE = "cluster.json"
LOCK_FILE = "lock"
POLL_S = 0.5


class Phase(StrEnum):
    """How far a fleet is."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What the state file holds: `done` are the names that are ready, `urls` where each answers /health."""

    pid: int
    phase: Phase
    router: str
    gateway: str
    urls: dict[str, str]
    done: tuple[str, ...] = ()
    error: str = ""


def read_state(work_dir: Path) -> ClusterState | None:
    """The state of the fleet that runs in a folder, or why the last one failed; None where none ever ran.

    Raises ClusterError for a file that another program wrote.
    """
    path = work_dir / STATE_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return ClusterState(**{**raw, "phase": Phase(raw["phase"]), "done": tuple(raw["done"])})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise ClusterError(f"{path} is no state of a cluster: {error}") from error


def runs(work_dir: Path) -> bool:
    """Whether a keeper holds the folder."""
    try:
        with _held(work_dir):
            return False
    except FileNotFoundError:
        return False
    except ClusterError:
        return True


@contextmanager
def _held(work_dir: Path) -> Iterator[None]:
    descriptor = os.open(work_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ClusterError(f"a cluster runs in {work_dir} already") from error
        yield
    finally:
        os.close(descriptor)


def _write(work_dir: Path, state: ClusterState) -> None:
    path = work_dir / STATE_FILE
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
    fresh.rename(path)


class _EndedError(Exception):
    pass


def keep(description: Description) -> None:
    """Runs the fleet until SIGTERM or SIGINT. Raises ClusterError where it does not come up.

    A server that dies later is left dead, for `eldr cluster status` to show: restarting is a supervisor's job.
    """
    work_dir = description.work_dir
    work_dir.mkdir(parents=True, exist_ok=True)

    def ended(_number: int, _frame: FrameType | None) -> None:
        raise _EndedError

    with _held(work_dir):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, ended)
        fleet = LocalFleet(description.fleet, work_dir / "logs")
        layout = fleet.layout
        state = ClusterState(
            pid=os.getpid(),
            phase=Phase.STARTING,
            router=layout.router_address,
            gateway=layout.gateway_url,
            urls={server.name: server.http_url for server in layout.servers}
            | {"gateway": layout.gateway_url},
        )
        _write(work_dir, state)
        try:
            with fleet:
                _start(fleet, description, state)
                while True:
                    time.sleep(POLL_S)
        except _EndedError:
            (work_dir / STATE_FILE).unlink()
        except ClusterError as error:
            _write(work_dir, replace(state, phase=Phase.FAILED, error=str(error)))
            raise


def _start(fleet: LocalFleet, description: Description, state: ClusterState) -> None:
    work_dir, done = description.work_dir, list[str]()

    def ready(*names: str, phase: Phase = Phase.STARTING) -> None:
        done.extend(names)
        _write(work_dir, replace(state, phase=phase, done=tuple(done)))

    fleet.start_router(*description.router_args)
    ready("router")
    fleet.start_gateway(*description.gateway_args)
    ready("gateway")
    servers, width = fleet.layout.servers, description.fleet.start_together
    for first in range(0, len(servers), width):
        group = servers[first : first + width]
        fleet.start_group(group)
        ready(*(server.name for server in group))
    ready(phase=Phase.READY)


def keeper_words(config: Path) -> list[str]:
    """The command line of a keeper in the background."""
    return [sys.executable, "-m", "eldr.cli.main", "cluster", "up", "--foreground", f"--config={config}"]

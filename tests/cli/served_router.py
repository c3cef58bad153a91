"""A router in this process, and the command line as a process of its own against it.

gRPC's asynchronous half wants one event loop per process (case 4.5), so the verbs are not run in a thread.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

from eldr.router.server import RouterServer
from eldr.router.settings import RouterSettings


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    out: str
    err: str


@contextlib.asynccontextmanager
async def served_router(**settings) -> AsyncIterator[tuple[RouterServer, str]]:
    server = RouterServer(RouterSettings(**settings))
    port = await server.start("127.0.0.1:0")
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop(grace_s=0.1)


async def eldr(*words: object, **variables: str) -> Ended:
    """Runs `eldr` with these words."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("ELDR_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "eldr.cli.main",
        *map(str, words),
        env={**plain, "COLUMNS": "200", **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())

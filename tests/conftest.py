"""Settings of the whole suite. A selected test never passes by being skipped for want of its engine."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

# Two busy cores make single examples slow; pytest-timeout bounds whole tests.
# In CI the same examples each time, so that a red run means a change.
settings.register_profile(
    "eldr", deadline=None, max_examples=60, print_blob=True, derandomize="CI" in os.environ
)
settings.load_profile("eldr")

NEEDS_VLLM = ("engine", "cluster")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much of what has a long form is run."""
    parser.addoption("--soak", action="store_true", help="soak tests send 10,000 requests instead of 1,000")
    parser.addoption("--chaos", action="store_true", help="chaos tests run every process, fault and stage")


@pytest.fixture(autouse=True)
def logging_as_it_begins() -> Iterator[None]:
    """A verb that a test runs in this process sets what is logged; the next test shall not inherit it."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def soak_requests(request: pytest.FixtureRequest) -> int:
    """Requests of a soak test."""
    return 10_000 if request.config.getoption("--soak") else 1_000


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files of engine tests, which may import vLLM, where the run deselects them and has no vLLM."""
    if not collection_path.name.endswith("_engine.py") or find_spec("vllm") is not None:
        return None
    return "not engine" in config.option.markexpr or None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Ends the run with what to do when a selected test needs vLLM and there is none."""
    if session.config.option.collectonly or find_spec("vllm") is not None:
        return
    selected = [item for item in session.items if any(item.get_closest_marker(mark) for mark in NEEDS_VLLM)]
    if selected:
        raise pytest.UsageError(
            f"{len(selected)} selected tests need vLLM 0.32.0, which this environment lacks. Run them with "
            "`tox run -e engine`, or leave them out: `pytest -m 'not engine and not cluster'`"
        )

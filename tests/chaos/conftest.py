"""One cluster for the whole module: 1 prefill server in the slice, 2 in the full matrix."""

import json
from collections.abc import Iterator

import pytest
from chaos_fleet import TESTBED, ChaosFleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[ChaosFleet]:
    prefill = 2 if request.config.getoption("--chaos") else 1
    with ChaosFleet(prefill, 2, tmp_path_factory.mktemp("chaos")) as running:
        yield running


@pytest.fixture(scope="session")
def texts() -> Iterator[str]:
    """Prompts of about 150 tokens, each once in a session: no cell finds another one's prompt in a cache.

    Plain ASCII, which makes fewer tokens.
    """
    lines = (TESTBED / "prompts/evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    whole = [text for line in lines if (text := json.loads(line)["text"]).isascii()]
    pieces = (text[start : start + 500] for start in range(0, 5000, 250) for text in whole)
    return (piece for piece in pieces if len(piece) >= 200)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrises the cells: the slice, or the full matrix under --chaos."""
    if "cell" in metafunc.fixturenames:
        from test_chaos_cluster import MATRIX, SLICE

        cells = MATRIX if metafunc.config.getoption("--chaos") else SLICE
        metafunc.parametrize("cell", cells, ids=["-".join(cell) for cell in cells])

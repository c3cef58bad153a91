import sys

import pytest

from eldr.plots import style


def test_a_figure_says_its_finding_and_uses_no_pyplot_state():
    before = "matplotlib.pyplot" in sys.modules
    made, axes = style.figure("what was found")
    assert made.get_suptitle() == "what was found"
    assert made.axes == [axes]
    assert ("matplotlib.pyplot" in sys.modules) is before


def test_a_saved_picture_is_a_png_with_equal_bytes_for_equal_figures(tmp_path):
    for name in ("a.png", "b.png"):
        made, axes = style.figure("t")
        axes.bar([0, 1], [2, 3])
        style.save(made, tmp_path / name)
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert data == (tmp_path / "b.png").read_bytes()


def test_a_missing_matplotlib_is_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(style.MissingMatplotlibError, match=r"pip install 'eldr\[plots\]'"):
        style.figure("t")


def test_64_series_are_told_apart():
    assert len({tuple(style.mark(number).values()) for number in range(64)}) == 64

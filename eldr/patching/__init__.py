"""Applies, checks and reverts the vLLM patches of `patches/`. Standard library only."""

from eldr.patching.errors import PatchingError
from eldr.patching.patcher import Report, apply, revert, status
from eldr.patching.series import Series, bundled_series, load_series
from eldr.patching.state import FileState, FileStatus, TreeState
from eldr.patching.tree import VllmTree, find_installed, open_tree

__all__ = [
    "FileState",
    "FileStatus",
    "PatchingError",
    "Report",
    "Series",
    "TreeState",
    "VllmTree",
    "apply",
    "bundled_series",
    "find_installed",
    "load_series",
    "open_tree",
    "revert",
    "status",
]

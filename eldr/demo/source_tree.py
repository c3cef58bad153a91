"""Finds the testbed of the source tree and prepares the model that is served."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

IN_TREE = Path("integration")


class SourceTreeError(Exception):
    """The testbed is not where it should be, or its model cannot be prepared."""


@dataclass(frozen=True, slots=True)
class SourceTree:
    """Paths below the folder `integration` of the source tree."""

    root: Path

    @property
    def model(self) -> Path:
        """The model as it was trained."""
        return self.root / "testbed/model"

    @property
    def calibration_prompts(self) -> Path:
        """Prompts to calibrate with."""
        return self.root / "testbed/prompts/calibration.jsonl"

    @property
    def evaluation_prompts(self) -> Path:
        """Prompts of other documents, to send."""
        return self.root / "testbed/prompts/evaluation.jsonl"

    @property
    def reference_script(self) -> Path:
        """The independent reference of expert counts."""
        return self.root / "reference/hf_counts.py"

    def served_model(self, width: int, cache: Path) -> Path:
        """The model whose experts have `width`, made in `cache` where it is missing; 0 takes it as trained.

        Raises SourceTreeError with what the inflation said.
        """
        if width == 0:
            return self.model
        target = cache / f"testbed-{width}"
        script = self.root / "testbed/inflate.py"
        words = [sys.executable, str(script), str(self.model), str(target), f"--width={width}"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SourceTreeError(f"the model cannot be widened to {width}: {done.stderr.strip()}")
        return target


def find_source_tree() -> SourceTree:
    """The testbed of the working directory's tree, else of the tree that this package runs from.

    Raises SourceTreeError where neither has one: the testbed is not part of the installed package.
    """
    places = (Path.cwd() / IN_TREE, Path(__file__).resolve().parents[2] / IN_TREE)
    for place in places:
        tree = SourceTree(place)
        if (tree.model / "config.json").is_file():
            return tree
    raise SourceTreeError(f"no testbed in {' or '.join(map(str, places))}; run from a source tree of eldr")

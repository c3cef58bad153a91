"""Runs a benchmark of this folder by name: `python -m integration.bench NAME [ARGUMENT ...]`."""

import difflib
import runpy
import sys
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Entry point; a wrong name ends with those that exist."""
    here = Path(__file__).parent
    names = sorted(path.stem for path in here.glob("[!_]*.py"))
    name = arguments[0] if arguments else ""
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        sys.exit(f"no benchmark {name!r}. {hint}There are: {', '.join(names) or 'none'}")
    sys.argv = [str(here / f"{name}.py"), *arguments[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])

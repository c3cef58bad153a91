"""Protobuf checks: buf lint, generated code up to date, no breaking change since the last release or main.

Run from a checkout with the extra `lint`: `python integration/lint_protos.py`.
"""

import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str) -> bool:
    """Whether the command succeeded; its output goes to the terminal."""
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def git(*arguments: str) -> bytes | None:
    """Output of a git command, None where there is no git, no history or no such revision."""
    try:
        done = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def baseline() -> str | None:
    """The last release tag, else main, else nothing to compare with."""
    tag = git("describe", "--tags", "--abbrev=0", "--match", "v*")
    if tag:
        return tag.decode().strip()
    for branch in ("main", "origin/main"):
        if git("rev-parse", "--verify", "--quiet", branch):
            return branch
    return None


def compatible() -> bool:
    """True where the messages of the baseline can still be read."""
    revision = baseline()
    archive = git("archive", "--format=zip", revision, "protos", "buf.yaml") if revision else None
    if archive is None:
        print("lint_protos: no history with protos/ to compare with, compatibility not checked")
        return True
    print(f"lint_protos: compatibility with {revision}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            files.extractall(folder)
        return run("buf", "breaking", "--against", folder)


def main() -> None:
    """Entry point."""
    checks = [
        run("buf", "lint"),
        run(sys.executable, "-m", "eldr.rpc.generate", "--check"),
        compatible(),
    ]
    sys.exit(0 if all(checks) else 1)


if __name__ == "__main__":
    main()

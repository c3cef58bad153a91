"""Files that are either whole or absent, and their hashes."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Calls `write` with a temporary file beside `path`, then puts it in place of `path` in one step.

    Whatever goes wrong, `path` keeps its old content and no temporary file stays. Raises OSError.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_sha256(paths: Sequence[Path]) -> str:
    """Of the one file, or of the files' own hashes in their order."""
    hashes = [file_sha256(path) for path in paths]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()

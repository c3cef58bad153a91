"""What eldr keeps beside a patched vLLM: the upstream files, and the hashes of what it wrote.

With it a tree that an older series patched can be told from one that was changed by hand, and both a newer
series and a revert start from upstream's own bytes. It lives in `.eldr-patches/` and goes with a revert.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from eldr.patching.errors import PatchingError

FOLDER = ".eldr-patches"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class KeptFile:
    """One file: its upstream bytes, and sha256 of every content that eldr wrote or meant to write."""

    upstream: bytes
    written: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """All kept files, by path, and the vLLM version that they are of."""

    version: str
    files: dict[str, KeptFile] = field(default_factory=dict)

    def contents(self) -> dict[str, bytes]:
        """The record as files, by path in the tree; the index comes last."""
        files = {f"{FOLDER}/upstream/{path}": kept.upstream for path, kept in self.files.items()}
        written = {path: kept.written for path, kept in self.files.items()}
        index = {"format": _FORMAT, "version": self.version, "written": written}
        files[f"{FOLDER}/record.json"] = json.dumps(index, indent=2).encode() + b"\n"
        return files


def load_record(root: Path, version: str) -> Record:
    """The record of a tree; an empty one where there is none or it is of another vLLM version.

    Raises PatchingError where it is damaged.
    """
    folder = root / FOLDER
    if not (folder / "record.json").exists():
        return Record(version)
    try:
        index = json.loads((folder / "record.json").read_bytes())
        if index["format"] != _FORMAT:
            raise ValueError(f"format {index['format']}, not {_FORMAT}")
        if index["version"] != version:
            return Record(version)
        files = {
            path: KeptFile((folder / "upstream" / path).read_bytes(), tuple(written))
            for path, written in index["written"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PatchingError(
            f"{folder} is damaged or of another eldr ({error}): remove that folder and try again"
        ) from error
    return Record(version, files)

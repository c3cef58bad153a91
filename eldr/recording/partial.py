"""The finished requests of a calibration that goes on, so that an interrupted one continues where it stopped."""

import base64
import binascii
import fcntl
import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from eldr.recording.request_counts import GateSums, RequestCounts, RequestCountsError, require_same_model
from eldr.rpc.codec import CodecError, signature_from_text, signature_to_text

PARTIAL_VERSION = 1
_BEGIN = re.compile(rb"[0-9a-f]{8} \{")
_BEGIN_BYTES = 10


class PartialError(ValueError):
    """A partial file that this run cannot continue; the message names the file and both values."""


class PartialFile:
    """Lines of JSON, each behind its CRC-32: what the run is bound to, then one line a finished request.

    A context manager that holds the file for this process alone, and leaves none where nothing was finished. `rows`
    are the requests that are finished, by id.
    From the first line on that a crash has torn or damaged, the file is cut and those requests are run again.
    Raises PartialError where `binding` is not that of the file, or another process writes it.
    """

    def __init__(self, path: Path, binding: Mapping[str, Any]) -> None:
        self.path = path
        self.rows: dict[str, RequestCounts] = {}
        self.damaged_lines = 0
        self._binding: dict[str, Any] = json.loads(json.dumps({"eldr_partial": PARTIAL_VERSION, **binding}))
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        file = open(self.path, "a+b")
        try:
            self._take(file)
        except BaseException:
            file.close()
            raise
        self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            if not self.rows:
                self.remove()
            self._file.close()
            self._file = None

    def add(self, row: RequestCounts) -> None:
        """Appends a finished request. Raises RequestCountsError where it is of another model than the others."""
        assert self._file is not None
        for other in self.rows.values():
            require_same_model(other.prefill, row.prefill, f"counts of {row.id!r}")
            break
        _append(self._file, _encode(row))
        self.rows[row.id] = row

    def remove(self) -> None:
        """Ends the run: everything is in the counts file now."""
        self.path.unlink(missing_ok=True)

    def _take(self, file: BinaryIO) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PartialError(f"{self.path}: another calibration writes it") from error
        file.seek(0)
        data = file.read()
        if len(data) >= _BEGIN_BYTES and not _BEGIN.match(data):
            raise PartialError(f"{self.path} is no partial calibration: move it, or name another --out")
        # What follows the last newline is a line that a crash has cut.
        *whole, torn = data.split(b"\n")
        size = kept = 0
        for line in whole:
            content = _checked(line)
            if content is None or not self._read(kept, content):
                break
            size += len(line) + 1
            kept += 1
        self.damaged_lines = len(whole) - kept + bool(torn)
        if self.damaged_lines:
            file.truncate(size)
        if not kept:
            _append(file, self._binding)

    def _read(self, number: int, content: Mapping[str, Any]) -> bool:
        """Takes a whole line; False where it makes no sense. Raises PartialError."""
        if number == 0:
            self._require_binding(content)
            return True
        try:
            row = _decode(content)
        except (CodecError, RequestCountsError, LookupError, TypeError, ValueError, zlib.error):
            return False
        self.rows[row.id] = row
        return True

    def _require_binding(self, found: Mapping[str, Any]) -> None:
        names = sorted(found.keys() | self._binding.keys())
        changed = [
            f"{name} {found.get(name)!r}, now {self._binding.get(name)!r}"
            for name in names
            if found.get(name) != self._binding.get(name)
        ]
        if changed:
            raise PartialError(
                f"{self.path} was begun with {'; '.join(changed)}. Give the old settings to go on, or --restart to "
                "begin anew"
            )


def _append(file: BinaryIO, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, separators=(",", ":")).encode()
    file.write(b"%08x %s\n" % (zlib.crc32(text), text))
    file.flush()
    os.fsync(file.fileno())


def _checked(line: bytes) -> dict[str, Any] | None:
    """The content of a line, None where it is damaged."""
    crc, _, text = line.partition(b" ")
    try:
        content = json.loads(text) if int(crc, 16) == zlib.crc32(text) else None
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _encode(row: RequestCounts) -> dict[str, Any]:
    content: dict[str, Any] = {
        "id": row.id,
        "domain": row.domain,
        "prefill": signature_to_text(row.prefill),
        "decode": None if row.decode is None else signature_to_text(row.decode),
    }
    if row.gate is not None:
        sums = np.stack([row.gate.probability, row.gate.logit]).astype("<f4")
        content["gate"] = base64.b64encode(zlib.compress(sums.tobytes(), 1)).decode()
    return content


def _decode(content: Mapping[str, Any]) -> RequestCounts:
    prefill = signature_from_text(content["prefill"])
    gate = None
    if "gate" in content:
        try:
            packed = base64.b64decode(content["gate"], validate=True)
        except binascii.Error as error:
            raise RequestCountsError(f"gate sums of {content['id']!r} are not base64") from error
        sums = np.frombuffer(zlib.decompress(packed), "<f4").reshape(2, *prefill.shape)
        gate = GateSums(sums[0].astype(np.float32), sums[1].astype(np.float32))
    decode = content["decode"]
    return RequestCounts(
        id=content["id"],
        prefill=prefill,
        decode=None if decode is None else signature_from_text(decode),
        domain=content["domain"],
        gate=gate,
    )

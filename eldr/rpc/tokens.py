"""Bearer tokens from files, read again when the files change.

A file holds one token a line, so that an old and a new one are good at the same time; blank lines and lines that begin
with # are left out. A line `sha256:<64 hex digits>` accepts the token with that hash without holding it.
"""

import hashlib
import hmac
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import structlog

log = structlog.get_logger()

MIN_CHARACTERS = 16
MAX_CHARACTERS = 512
MAX_TOKENS = 1024

_TOKEN = re.compile(r"[!-~]+")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")


class TokenError(ValueError):
    """A file of tokens that cannot be used; the message names file and line, never a token."""


class Role(StrEnum):
    """Who calls. `docs/security.md` has what each may."""

    WORKER = "worker"
    CLIENT = "client"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class _Tokens:
    digests: tuple[bytes, ...]
    shown: str


class TokenFile:
    """The tokens of one file, of which the first is `shown` where the file is a caller's. Any thread.

    Raises TokenError where the file cannot be used, or `shows` and it holds hashes alone. A file that cannot be used
    later is not taken: the tokens that were read last go on, and a warning says so.
    """

    def __init__(self, path: Path, shows: bool = False) -> None:
        self.path = path
        self._shows = shows
        self._lock = threading.Lock()
        self._stamp = _stamp(path)
        self._tokens = _read(path, shows)

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r})"

    def accepts(self, token: str) -> bool:
        """Whether the file holds the token. Takes the same time for any wrong one."""
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        found = False
        for known in self._current().digests:
            found |= hmac.compare_digest(digest, known)
        return found

    def shown(self) -> str:
        """The first token, for a caller to show. Raises TokenError where the file holds hashes alone."""
        shown = self._current().shown
        if shown is None:
            raise TokenError(
                f"token file {self.path}: holds hashes alone, and so no token that could be shown"
            )
        return shown

    def _current(self) -> _Tokens:
        with self._lock:
            stamp = _stamp(self.path)
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._tokens = _read(self.path, self._shows)
                except TokenError as error:
                    log.warning("token_file_not_reloaded", why=str(error))
                else:
                    log.info("token_file_reloaded", file=str(self.path), tokens=len(self._tokens.digests))
            return self._tokens


class TokenTable:
    """Which role a token has. The files of the roles are told apart by their names alone."""

    def __init__(self, files: Mapping[Role, TokenFile]) -> None:
        self._files = dict(files)

    def role_of(self, authorization: str | None) -> Role | None:
        """Role behind the value of an Authorization header; None for a missing, malformed or unknown one."""
        token = bearer(authorization)
        if token is None:
            return None
        found = None
        for role, file in self._files.items():
            if file.accepts(token):
                found = role
        return found


def bearer(authorization: str | None) -> str | None:
    """The token of `Bearer <token>`, None where the value is anything else."""
    scheme, _, token = (authorization or "").partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and 0 < len(token) <= MAX_CHARACTERS else None


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def _read(path: Path, shows: bool) -> _Tokens:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise TokenError(f"token file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        # Without its cause, whose text would hold bytes of the file.
        raise TokenError(f"token file {path}: byte {error.start} is not ASCII") from None
    digests, shown = [], ""
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        known = _HASH.fullmatch(text)
        if known:
            digests.append(bytes.fromhex(known[1]))
            continue
        if text.startswith("sha256:"):
            raise TokenError(
                f"token file {path} line {number}: a hash must be sha256: and 64 lower-case hex digits"
            )
        if not _TOKEN.fullmatch(text) or not MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS:
            raise TokenError(
                f"token file {path} line {number}: a token must be {MIN_CHARACTERS} to {MAX_CHARACTERS} printable "
                f"characters without spaces, got {len(text)} characters"
            )
        digests.append(hashlib.sha256(text.encode()).digest())
        shown = shown or text
    if not 0 < len(digests) <= MAX_TOKENS:
        raise TokenError(f"token file {path}: must hold 1 to {MAX_TOKENS} tokens, got {len(digests)}")
    if shows and not shown:
        raise TokenError(f"token file {path}: holds hashes alone, and so no token to show")
    return _Tokens(tuple(digests), shown)

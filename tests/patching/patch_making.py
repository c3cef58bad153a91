"""Small series and patches as git would write them."""

from collections.abc import Callable
from difflib import unified_diff

from eldr.patching import Series, VllmTree

MakeSeries = Callable[..., Series]
MakeTree = Callable[..., VllmTree]


def git_diff(path: str, old: bytes, new: bytes) -> bytes:
    """What `git diff` prints for a changed text file."""
    lines = unified_diff(
        old.decode().splitlines(keepends=True),
        new.decode().splitlines(keepends=True),
        f"a/{path}",
        f"b/{path}",
    )
    body = "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
    return f"diff --git a/{path} b/{path}\nindex 1111111..2222222 100644\n{body}".encode()


def format_patch(subject: str, *diffs: bytes) -> bytes:
    """What `git format-patch` writes around diffs."""
    header = (
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: A <a@b>\nSubject: [PATCH] {subject}\n\nWhy.\n---\n"
    )
    return header.encode() + b"".join(diffs) + b"-- \n2.39.5\n\n"

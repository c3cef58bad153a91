"""Token files: what is accepted, what is shown, what is read again, and that no token is ever told."""

import hashlib
import traceback
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from eldr.rpc.tokens import Role, TokenError, TokenFile, TokenTable, bearer

FIRST = "first-secret-0123456789"
SECOND = "second-secret-0123456789"


def token_file(path: Path, *lines: str) -> TokenFile:
    path.write_text("\n".join(lines) + "\n")
    return TokenFile(path)


def test_a_file_accepts_each_of_its_tokens_and_shows_the_first(tmp_path: Path) -> None:
    file = token_file(tmp_path / "t", "# from the vault", "", FIRST, SECOND)
    assert file.accepts(FIRST)
    assert file.accepts(SECOND)
    assert file.shown() == FIRST
    for wrong in ("", FIRST[:-1], FIRST + "x", "# from the vault", "\ud800"):
        assert not file.accepts(wrong)


def test_a_hash_accepts_its_token_and_is_no_token_itself(tmp_path: Path) -> None:
    digest = "sha256:" + hashlib.sha256(FIRST.encode()).hexdigest()
    file = token_file(tmp_path / "t", digest)
    assert file.accepts(FIRST)
    assert not file.accepts(digest)
    with pytest.raises(TokenError, match="holds hashes alone"):
        TokenFile(file.path, shows=True)


def test_a_replaced_file_is_read_again_and_a_broken_one_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "t"
    file = token_file(path, FIRST)
    with capture_logs() as logs:
        path.write_text("short\n")
        assert file.accepts(FIRST)
        path.write_text(SECOND + "\n")
        assert file.accepts(SECOND)
        assert not file.accepts(FIRST)
        path.unlink()
        assert file.accepts(SECOND)
    assert [entry["event"] for entry in logs] == [
        "token_file_not_reloaded",
        "token_file_reloaded",
        "token_file_not_reloaded",
    ]
    assert "line 1" in logs[0]["why"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must hold 1 to 1024 tokens, got 0"),
        (b"# nothing\n", "got 0"),
        (b"tiny-secret\n", "line 1: a token must be 16 to 512 printable"),
        (b"# x\nwith a space in it, long\n", "line 2: a token must be"),
        (b"sha256:abc\n", "line 1: a hash must be"),
        (b"\xff" * 20, "byte 0 is not ASCII"),
        ((FIRST + "\n").encode() * 1025, "got 1025"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_its_contents_are_not(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(TokenError, match=message) as caught:
        TokenFile(path)
    assert str(path) in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "xff" not in "".join(traceback.format_exception(caught.value))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenError, match=r"token file .*none: No such file"):
        TokenFile(tmp_path / "none")


def test_no_token_is_in_what_prints_a_file(tmp_path: Path) -> None:
    file = token_file(tmp_path / "t", FIRST)
    assert FIRST not in repr(file)
    assert FIRST not in str({"token": file})


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
        ("Basic abc", None),
        ("Bearer", None),
        ("Bearer ", None),
        ("", None),
        (None, None),
        ("Bearer " + "x" * 513, None),
    ],
)
def test_the_token_of_an_authorization_header(header: str | None, token: str | None) -> None:
    assert bearer(header) == token


def test_a_token_has_the_role_of_its_file(tmp_path: Path) -> None:
    table = TokenTable(
        {
            Role.WORKER: token_file(tmp_path / "w", FIRST),
            Role.ADMIN: token_file(tmp_path / "a", SECOND),
        }
    )
    assert table.role_of(f"Bearer {FIRST}") is Role.WORKER
    assert table.role_of(f"Bearer {SECOND}") is Role.ADMIN
    assert table.role_of(f"Basic {SECOND}") is None
    assert table.role_of("Bearer unknown-secret-0123456789") is None

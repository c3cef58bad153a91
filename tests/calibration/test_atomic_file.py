import hashlib
from typing import BinaryIO

import pytest

from eldr.calibration.atomic_file import file_sha256, write_atomically


def test_a_new_content_replaces_the_old_one(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    write_atomically(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_failed_write_leaves_the_old_content_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_missing_folder_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        write_atomically(tmp_path / "none" / "file", lambda file: file.write(b""))


def test_the_hash_is_that_of_the_bytes(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert file_sha256(path) == hashlib.sha256(b"abc").hexdigest()

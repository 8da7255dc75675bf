"""A file is replaced completely or not at all, without leftovers."""

import os

import pytest

from cardwise.runtime import replacing


def test_replaced_file_has_its_mode_whatever_the_umask(tmp_path):
    path = tmp_path / "state.json"
    path.write_text("old")
    before = os.umask(0o077)
    try:
        replacing.replace_file(path, b"new")
    finally:
        os.umask(before)
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_readers_see_the_old_file_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "state"
    path.write_text("old")
    with path.open() as reading:
        replacing.replace_file(path, b"new" * 100_000)
        assert reading.read() == "old"


def test_failed_replacement_keeps_the_file_and_leaves_nothing(tmp_path):
    path = tmp_path / "folder"
    (path / "in it").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        replacing.replace_file(path, b"new")
    assert list(tmp_path.iterdir()) == [path]

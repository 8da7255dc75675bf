"""The folders that containers mount: who may read them."""

import os

from mps.daemon import directories


def test_folders_are_open_to_all_whatever_the_umask(folder):
    before = os.umask(0o077)
    try:
        directories.prepare(folder / "a" / "b")
    finally:
        os.umask(before)
    for path in (folder / "a", folder / "a" / "b", folder / "a" / "b" / "pipe"):
        assert path.stat().st_mode & 0o777 == 0o755

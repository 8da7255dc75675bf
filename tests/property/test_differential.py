"""Which tests/property another commit plays with."""

import shutil
import subprocess

import pytest

from tests.property import differential

BROKEN = "from tests.build import what_no_commit_has\n"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A repository with this tree as its one commit."""
    root = tmp_path / "tree"
    for part in differential.PARTS:
        shutil.copytree(differential.ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
    commit(root)
    monkeypatch.setattr(differential, "ROOT", root)
    return root


def commit(root):
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "a base"]):
        subprocess.run([*git, *arguments], cwd=root, check=True)


def play_base(folder) -> dict[str, str]:
    folder.mkdir()
    base = differential.Base("HEAD", folder)
    try:
        return base.played(differential.FIRST_HISTORY).bound
    finally:
        base.close()


def test_a_base_plays_with_its_own_files_where_those_of_this_tree_do_not_fit(tree, tmp_path):
    (tree / "tests/property/blackbox.py").write_text(BROKEN)
    assert play_base(tmp_path / "base") == {"p1": "n1 0:1024:0"}


def test_a_base_with_different_steps_is_refused(tree, tmp_path):
    path = tree / "tests/property/blackbox.py"
    path.write_text(path.read_text().replace("def starts(self, extender: int)", "def starts(self, of: int)"))
    commit(tree)
    path.write_text(BROKEN)
    with pytest.raises(SystemExit, match=r"HEAD cannot play .* unexpected keyword argument 'extender'"):
        play_base(tmp_path / "base")

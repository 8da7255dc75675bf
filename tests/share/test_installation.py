"""The folder that is mounted: complete, readable by any user, for old Pythons too, whole at every moment."""

import ast
import os
import stat

import pytest

from cardwise.share import FRAMEWORKS, installation


def test_it_has_the_hook_at_its_root_and_a_file_for_each_framework():
    names = set(installation.list_container_files())
    assert {"sitecustomize.py", "cardwise/share/__main__.py"} <= names
    assert {f"_cardwise_{framework}.py" for framework in FRAMEWORKS} <= names
    # An __init__.py there would do nothing, and installation.py is the node's.
    assert not {"__init__.py", "cardwise/share/installation.py"} & names


@pytest.mark.parametrize("name", sorted(installation.list_container_files()))
def test_every_file_is_python_3_7(name):
    # Names of later standard libraries it cannot see: the frameworks' tests run it, by the image's Python.
    ast.parse(installation.list_container_files()[name], filename=name, feature_version=(3, 7))


def test_any_user_can_read_it(tmp_path):
    old = os.umask(0o077)
    try:
        installation.install_files(tmp_path / "a" / "mount")
    finally:
        os.umask(old)
    for path in (tmp_path / "a" / "mount").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o755 if path.is_dir() else 0o644), path


def test_laid_out_again_it_touches_only_what_differs(tmp_path):
    installation.install_files(tmp_path)
    before = {path: path.stat().st_ino for path in tmp_path.rglob("*.py")}
    (tmp_path / "sitecustomize.py").write_text("damaged")
    installation.install_files(tmp_path)
    assert (tmp_path / "sitecustomize.py").read_bytes() == installation.list_container_files()["sitecustomize.py"]
    changed = {path.name for path, inode in before.items() if path.stat().st_ino != inode}
    assert changed == {"sitecustomize.py"}
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_the_reader_runs_from_it_alone(container):
    done = container.start(["-c", "import cardwise.share; print(cardwise.share.__file__)"])
    assert done.stdout.strip() == str(container.mount / "cardwise" / "share" / "__init__.py")

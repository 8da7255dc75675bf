import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mps.worlds import Node


@pytest.fixture(autouse=True)
def python_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The double runs in the interpreter of the tests, not in a wrapper that happens to be first in PATH."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, because the paths of pipes end at 87 bytes, and open to all."""
    path = Path(tempfile.mkdtemp(prefix="cwmps-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def node(folder: Path) -> Iterator[Node]:
    """With one card; not started yet."""
    made = Node(folder, cards=1)
    yield made
    made.close()


@pytest.fixture
def pair(folder: Path) -> Iterator[Node]:
    """With two cards; not started yet."""
    made = Node(folder)
    yield made
    made.close()

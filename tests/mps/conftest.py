import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mps.mpsnode import Node


@pytest.fixture
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
def make_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    """A node that is not started yet."""
    nodes = []

    def make(**settings: Any) -> Node:
        nodes.append(Node(folder, monkeypatch, **settings))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()
        assert {event.type for event in node.events.all} <= {"Warning"}


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    """With one card."""
    return make_node(cards=1)


@pytest.fixture
def pair(make_node: Callable[..., Node]) -> Node:
    """With two cards."""
    return make_node(cards=2)

"""The real frameworks, in the environment that `make test-frameworks` makes."""

from pathlib import Path

import pytest

from tests.share.container import HALF, Container

PYTHON = Path(__file__).parents[2] / ".venv-frameworks" / "bin" / "python"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}


@pytest.fixture
def container(tmp_path):
    """A container with half of a card of 16276 MiB; the frameworks may say on stderr what they like."""
    if not PYTHON.exists():
        pytest.skip("no .venv-frameworks: `make test-frameworks` makes it (3 GB to load)")
    container = Container(tmp_path, PYTHON)
    container.env.update(HALF, **QUIET)
    return container

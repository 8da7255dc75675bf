"""The real Helm and the chart that it renders."""

import functools
import shutil
from pathlib import Path

import pytest

from tests.helm.rendering import Objects, Render, documents, template


@pytest.fixture(scope="session")
def helm() -> str:
    path = shutil.which("helm")
    built = sorted((Path.home() / ".cache" / "cardwise").glob("helm-*/helm"))
    if path is None and not built:
        pytest.skip("there is no helm in PATH; `python -m tests.cluster up` builds one")
    return path or str(built[-1])


@pytest.fixture(scope="session")
def render(helm: str) -> Render:
    @functools.cache  # tests only read it
    def rendered(*sets: str) -> Objects:
        done = template(helm, *sets)
        assert done.returncode == 0, done.stderr
        return documents(done.stdout)

    return rendered

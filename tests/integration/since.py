"""Tests of what Kubernetes has since some minor; `make test-versions` runs them on older ones too."""

import pytest

from tests.cluster import versions


def is_here(minor: int) -> bool:
    """Whether the tests run on 1.`minor` or newer."""
    return int(versions.minor().split(".")[1]) >= minor


def since(minor: int, what: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not is_here(minor), reason=f"{what}: there since Kubernetes 1.{minor}")

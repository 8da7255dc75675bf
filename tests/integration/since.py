"""Tests of what Kubernetes has since some minor; `make test-versions` runs them on older ones too."""

import pytest

from tests.cluster import versions


def since(minor: int, what: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not versions.at_least(minor), reason=f"{what}: there since Kubernetes 1.{minor}")

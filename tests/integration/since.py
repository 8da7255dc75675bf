"""Tests of what Kubernetes has since some minor; `make test-versions` runs them on older ones too."""

import pytest

from tests.cluster import versions


def since(minor: int, feature: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not versions.at_least(minor), reason=f"{feature}: there since Kubernetes 1.{minor}")

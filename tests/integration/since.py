"""Tests of what Kubernetes has since some minor; `make test-versions` runs them on older ones too."""

import pytest

from tests.cluster import versions


def since(minor: int, what: str) -> pytest.MarkDecorator:
    here = int(versions.minor().split(".")[1])
    return pytest.mark.skipif(here < minor, reason=f"{what}: on without a feature gate since 1.{minor}")

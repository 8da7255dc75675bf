import pytest

from tests.share.container import Container


@pytest.fixture
def container(tmp_path):
    return Container(tmp_path)

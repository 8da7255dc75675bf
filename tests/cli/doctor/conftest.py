"""The sound installation, for each test anew."""

import pytest

from cardwise.cli.doctor.facts import Facts
from tests.cli.doctor import planted


@pytest.fixture
def sound() -> Facts:
    return planted.installation()

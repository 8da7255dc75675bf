"""The table of traps and their tests in docs/design/0005-mps.md: tests that it names exist where it says."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "design" / "0005-mps.md"
TABLE = PAGE.read_text().partition("## Traps and their tests")[2]
ROWS = re.findall(r"^\| (.+?) \| (.*`test_.+) \|$", TABLE, re.MULTILINE)


def test_each_section_has_some():
    sections = [found for trap, _ in ROWS for found in re.findall(r"^\*\*(1\.\d)\*\*", trap)]
    assert sections == ["1.2", "1.3", "1.4", "1.5", "1.6"]
    assert len(ROWS) > 30


@pytest.mark.parametrize(("trap", "tests"), ROWS)
def test_a_trap_has_the_tests_that_are_named(trap, tests):
    for part in tests.split(";"):
        folder = TESTS.parent / (re.findall(r"`(tests/\w+)`:", part) or ["tests/mps"])[0]
        defined = "".join(path.read_text() for path in folder.rglob("test_*.py"))
        for name in re.findall(r"`(test_\w+)`", part):
            assert f"def {name}(" in defined, f"{name} is not in {folder.name}"

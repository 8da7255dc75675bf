"""Each theory of operation has a worked example, and a test computes it."""

import re
import subprocess

import pytest

from tests.theory import ROOT, theory_in, theory_of


def _tracked(*patterns: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, check=True, capture_output=True, text=True)
    return [path for path in listed.stdout.split() if (ROOT / path).is_file()]


MODULES = [
    path.removesuffix(".py").replace("/", ".")
    for path in _tracked("*.py")
    if not path.startswith("tests/") and theory_in((ROOT / path).read_text())
]
COMPUTED = {
    name
    for path in _tracked("tests/*.py")
    for name in re.findall(r'theory_of\("([\w.]+)"\)', (ROOT / path).read_text())
}


@pytest.mark.parametrize("module", MODULES)
def test_a_theory_of_operation_has_an_example_that_a_test_computes(module):
    assert "example" in theory_of(module).lower()
    assert module in COMPUTED, f"no test reads the example: theory_of({module!r})"


def test_the_algorithms_that_are_not_obvious_have_one():
    assert {
        "cardwise.core.gangs.gangplan",
        "cardwise.core.placement.scored.fragments",
        "cardwise.core.placement.scored.pricing",
        "cardwise.core.placement.searching",
        "cardwise.core.preemption.cardvictims",
        "cardwise.core.preemption.setcover",
        "cardwise.kube.fairqueueing",
        "cardwise.kube.leases.election",
        "deviceplugin.grants.grants",
        "extender.cache.commit",
        "extender.gangs.cardsearch",
        "extender.gangs.reservation",
        "extender.leadership.fence",
        "extender.preemption.gangpreemption",
        "mps.daemon.ceilings",
    } <= set(MODULES)

"""The programs of the repository that no other test starts: each can at least be started, or imported."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WITH_HELP = (
    "bench",  # its commands: tests/bench
    "demo",  # starts a cluster
    "release",  # builds for minutes; make release
    "tests.cluster",
    "tests.property.differential",
    "tests.property.planted",  # draws histories for minutes
    "tests.property.plantedclaims",  # runs tests for a minute
    "tests.property.replay",
    "tests.realcard",
    "tests.words",
)
# They take no options of their own: they begin at once to download, to start a cluster, or to change files.
IMPORTED = (
    "bench.apiserver",
    "bench.connections",
    "bench.lockprobe",
    "docs.pictures.draw",
    "docs.pictures.record",
    "release.agentroot",
    "tests.cluster.devicesplugin",
    "tests.cluster.nominatingextender",
    "tests.cluster.simnodes",
    "tests.integration.rotatingwebhook",
    "tests.mps.fetch",
    "tests.realcard.tenant",
)


def run_module(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("module", WITH_HELP)
def test_a_program_shows_its_help(module):
    assert "usage:" in run_module(module, "--help").lower()


@pytest.mark.parametrize("module", IMPORTED)
def test_a_program_without_options_is_imported(module):
    importlib.import_module(module)


def test_each_program_is_named_here():
    starts = 'if __name__ == "__main__":'
    programs = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for part in ("bench", "demo", "docs", "release", "tests")
        for path in (ROOT / part).rglob("*.py")
        if not path.name.startswith("test_") and "_build" not in path.parts and f"\n{starts}" in path.read_text()
    }
    # Tests start them, the latter where PyTorch is.
    assert programs - {"tests.runtime.http.servingprogram", "tests.realcard.model"} == {*WITH_HELP, *IMPORTED}


def test_an_extender_of_another_commit_is_compared():
    command = ["git", "diff", "--quiet", "HEAD", "--", "cardwise", "extender", "tests"]
    if subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("this tree is not that of a commit, so its extender may well place otherwise")
    assert "1 the same" in run_module("tests.property.differential", "--base", "HEAD", "--examples", "1")

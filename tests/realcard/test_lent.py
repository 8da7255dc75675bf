"""The run on a lent machine, by doubles: what travels and what of it is unpacked, and results that outlast a cut."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import binaries
from tests.realcard import packing, results
from tests.realcard.__main__ import parser
from tests.realcard.packing import MIB, TooLarge
from tests.realcard.scenarios import SCENARIOS, Run, Scenario

TREE = 15 * MIB
PIECE = 100 * 1024
LIMIT = TREE + packing.MARGIN + 4 * PIECE  # of a call: so that four pieces travel beside the tree


@pytest.fixture
def archives(tmp_path: Path) -> dict[str, packing.Files]:
    """Of three, two and one pieces that cannot be packed smaller."""
    files = {}
    for name, count in (("three", 3), ("two", 2), ("one", 1)):
        file = tmp_path / name
        file.write_bytes(os.urandom(count * PIECE))
        files[name] = [(f"inside/{name}", file)]
    return files


def test_loads_fit_into_calls_beside_the_working_tree(tmp_path: Path, archives: dict[str, packing.Files]) -> None:
    loads = packing.pack(tmp_path / "lent", archives, TREE, LIMIT)
    assert [[file.name for file in sorted(load.iterdir())] for load in loads] == [
        ["three.tar.xz"],
        ["one.tar.xz", "two.tar.xz"],
    ]
    for load in loads:
        assert TREE + sum(file.stat().st_size for file in load.iterdir()) <= LIMIT


def test_what_is_too_large_for_any_call_is_named(tmp_path: Path, archives: dict[str, packing.Files]) -> None:
    with pytest.raises(TooLarge, match=r"three.tar.xz has 0.3 MiB, and 0.2 MiB can travel beside .* of 15.2 MiB"):
        packing.pack(tmp_path / "lent", archives, TREE + 2 * PIECE, LIMIT)


def test_the_interpreter_that_travelled_is_the_one_that_starts(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "$0 $XDG_CACHE_HOME $*"\n')
    program.chmod(0o755)
    inside = "interpreter/usr/local"
    files = [(f"{inside}/bin/python3", program), (f"{inside}/lib/python3.11/site-packages/x.py", program)]
    (load,) = packing.pack(tmp_path / "lent", {"interpreter": files}, 0)
    there = tmp_path / "there"
    started = packing.unpack([load], there)
    shown = subprocess.run([started, "-m", "x"], capture_output=True, text=True, check=True).stdout
    assert shown.split() == [f"{there}/{inside}/bin/python3", f"{there}/cache", "-m", "x"]
    assert (there / inside / "lib/python3.11/site-packages/cardwise.pth").read_text().strip() == str(packing.ROOT)


def test_unpacking_needs_nothing_but_the_standard_library() -> None:
    """Of the machine's own Python, which has none of our packages."""
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(packing.ROOT)!r}); "]
    command[-1] += "from tests.realcard import __main__, packing"
    subprocess.run(command, check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="as on the lent machine: MPS daemons need root")
def test_scenarios_leave_their_results_and_a_cut_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARDWISE_GPU_DOUBLE", "1")
    whole = Scenario("tenants", ["test_tenants.py", "-k", "each_has"], 300.0)
    cut = Scenario("cut", ["test_tenants.py"], 0.6)
    assert not Run(tmp_path, 300.0).run([whole, cut, Scenario("late", ["test_card.py"], 600.0)])
    written = json.loads((tmp_path / results.FILE).read_text())["scenarios"]
    assert written["tenants"]["status"] == "passed"
    assert written["cut"]["status"].startswith("cut off after 1 s")
    assert re.fullmatch(r"skipped: \d+ s are left", written["late"]["status"])
    assert ["share of 2048 MiB, all three full", "1520 MiB allocated"] in written["tenants"]["rows"]
    assert "| share of 2048 MiB, all three full | 1520 MiB allocated |" in (tmp_path / results.TABLES).read_text()


def test_without_kubernetes_the_chart_is_skipped_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "cache_root", lambda: tmp_path)
    Run(tmp_path, 600.0).run([scenario for scenario in SCENARIOS if scenario.cluster])
    assert "skipped: kube, containerd, helm, nvidia did not travel" in (tmp_path / results.TABLES).read_text()


def test_each_scenario_names_tests_that_are_there() -> None:
    files = {word for scenario in SCENARIOS for word in scenario.tests if word.startswith("test_")}
    assert all((packing.ROOT / "tests/realcard" / file.partition("::")[0]).exists() for file in files)
    assert parser().parse_args(["run", "--out=x", "--only", SCENARIOS[0].name]).only == [SCENARIOS[0].name]

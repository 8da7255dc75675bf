"""The benchmarks of `python -m bench` run, each with the smallest numbers; the measured values are not checked."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.__main__ import main
from tests.simulation import smalltraces

ROOT = Path(__file__).parents[2]
TINY = ["--nodes=4", "--pods=8"]
# By case: the command's arguments, and the beginnings of the labels of rows that it must print.
RUNS = {
    "filter": (["filter", *TINY, "--classes=2", "--calls=10"], ["filter, one class", "prioritize"]),
    "filter fresh": (["filter", *TINY, "--calls=10", "--fresh", "--", "--policy=spread"], ["filter, no node fits"]),
    "bind": (["bind", *TINY, "--calls=2"], ["bind, "]),
    "pod": (["pod", "--nodes=4", "--calls=2"], ["filter, ", "bind, ", "a pod of 2"]),
    "memory": (["memory", *TINY], ["start and memory"]),
    "connections": (
        ["connections", *TINY, "--attackers=3", "--silent=3", "--calls=2", "--handshakes=2"],
        ["filter on one connection", "a new connection", "3 silent connections"],
    ),
    "gang": (["gang", "--nodes=20", "--pods=8", "--members=5", "--runs=1"], ["plan 5 members: 4 parameter servers"]),
    "lock-holds": (["lock-holds", "--nodes=20", "--pods=40", "--gangs=4", "--rounds=21"], ["all holds; 20 nodes"]),
    # Nodes that are full enough for preemption, and enough of them for a gang of 500.
    "big-lock-holds": (
        ["big-lock-holds", "--nodes=120", "--pods=1440", "--runs=1"],
        ["longest hold: a gang of 16 sizes", "longest hold: preemption on a node"],
    ),
    # Each filter call reserves a share for some seconds: with fewer nodes these leave no room for a gang.
    "compare": (
        ["compare", "HEAD", "--nodes=40", "--pods=80", "--calls=2", "--seconds=1", "--commits=8", "--turns=1"],
        ["filter alone: HEAD", "filter beside gangs of 100", "gang of 100 until it is planned", "commits: HEAD"],
    ),
    "scrape": (["scrape", *TINY, "--calls=2"], ["scrape of the extender"]),
    "agent": (["agent", "--seconds=1", "--probes=2"], ["share agent", "a probe"]),
    "placement": (["placement", "--seeds=1", "--processes=1"], ["tiny, binpack", "tiny, priced"]),
    "placement churn": (
        ["placement", "--trace=tiny", "--churn", "--lifetimes=0.1", "--seeds=1", "--processes=1"],
        ["tiny, churn, binpack", "tiny, churn, priced"],
    ),
    "placement decisions": (
        ["placement", "--trace=tiny", "--decisions=5", "--nodes=4"],
        ["binpack: a decision", "priced: memory"],
    ),
    "review": (["review", "--reviews=2"], ["mutate, a share |", "validate, a share with MPS and the agent |"]),
    "top": (["top", "--nodes=8", "--pods=8", "--calls=1"], ["cardwise top --once, one node"]),
}
ALIASES = {"start": "memory"}
# They start the cluster of tests/cluster and measure for minutes, so only their modules are imported.
OF_A_CLUSTER = {"throughput", "batching", "nomination", "admission", "gangrate", "failover"}


@pytest.mark.parametrize("case", RUNS)
def test_a_command_prints_its_rows(case, tmp_path, monkeypatch):
    arguments, labels = RUNS[case]
    monkeypatch.setenv("CARDWISE_OPENB", str(smalltraces.write_trace(tmp_path)))
    command = [sys.executable, "-m", "bench", *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    rows = [line for line in ran.stdout.splitlines() if line.startswith("| ")]
    for label in labels:
        assert any(row.startswith(f"| {label}") for row in rows), ran.stdout


@pytest.mark.parametrize("command", sorted(main.commands))
def test_each_command_has_help_and_is_run_or_needs_a_cluster(command):
    invoked = CliRunner().invoke(main, [command, "--help"])
    assert invoked.exit_code == 0, invoked.output
    ran = {arguments[0] for arguments, _ in RUNS.values()}
    assert ALIASES.get(command, command) in ran | OF_A_CLUSTER


@pytest.mark.parametrize("module", sorted(OF_A_CLUSTER))
def test_a_benchmark_that_needs_a_cluster_for_minutes_is_imported(module):
    assert callable(importlib.import_module(f"bench.{module}").run)

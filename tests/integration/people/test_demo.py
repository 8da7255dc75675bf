"""`make demo ARGS=--once` is the main job of the README: it must come out right, and leave nothing."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.cluster import Cluster

pytestmark = [pytest.mark.cluster]

ROOT = Path(__file__).parents[3]


def test_every_scene_comes_out_and_nothing_is_left():
    with tempfile.TemporaryDirectory(prefix="cw-", dir="/tmp") as folder:
        state = Path(folder, "d")
        command = [sys.executable, "-m", "demo", "--once", "--state-dir", str(state)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert "all scenes passed" in done.stdout
        assert done.stdout.count("✓") == 7
        assert "default/split" not in done.stdout
        assert Cluster.leftovers(state) == []


def test_a_demo_that_is_ended_takes_everything_down():
    with tempfile.TemporaryDirectory(prefix="cw-", dir="/tmp") as folder:
        state = Path(folder, "d")
        command = [sys.executable, "-m", "demo", "--once", "--state-dir", str(state)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            for line in running.stdout:
                if line.startswith("✓"):  # the first scene
                    running.send_signal(signal.SIGTERM)
                    break
            output = running.stdout.read()
        assert running.returncode == 1, output
        assert "stopping the cluster" in output
        assert Cluster.leftovers(state) == []

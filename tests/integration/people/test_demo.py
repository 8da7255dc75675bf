"""`make demo ARGS=--once` is the main job of the README: it must come out right, and leave nothing."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from demo.__main__ import WIDTH
from demo.scenes import SCENES
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
        assert done.stdout.count("✓") == len(SCENES)
        assert [line for line in done.stdout.splitlines() if len(line) > WIDTH] == []
        assert Cluster.leftovers(state) == []


# The line of the output at which a key or a signal comes: while the cluster starts, and in a scene.
@pytest.mark.parametrize(
    ("line", "number"), [("etcd and kube-apiserver are ready", signal.SIGINT), ("  ✓", signal.SIGTERM)]
)
def test_a_demo_that_is_interrupted_takes_everything_down(line, number):
    with tempfile.TemporaryDirectory(prefix="cw-", dir="/tmp") as folder:
        state = Path(folder, "d")
        command = [sys.executable, "-m", "demo", "--once", "--state-dir", str(state)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as running:
            assert running.stdout is not None
            next(printed for printed in running.stdout if line in printed)
            os.killpg(running.pid, number)
            time.sleep(0.2)
            os.killpg(running.pid, number)  # an impatient user's second one changes nothing
            output = running.stdout.read()
        assert running.returncode == 1, output
        assert "removed: " in output
        assert "nothing is left" in output
        assert Cluster.leftovers(state) == []

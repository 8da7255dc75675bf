"""`make demo ARGS=--once` is the main job of the README: it must come out right, and leave nothing."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.cluster import Cluster

pytestmark = [pytest.mark.cluster]

ROOT = Path(__file__).parents[2]


def test_every_scene_comes_out_and_nothing_is_left():
    with tempfile.TemporaryDirectory(prefix="cw-", dir="/tmp") as folder:
        state = Path(folder, "d")
        command = [sys.executable, "-m", "demo", "--once", "--state-dir", str(state)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=590)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert "all scenes came out right" in done.stdout
        assert done.stdout.count("✓") == 7
        assert Cluster.leftovers(state) == []

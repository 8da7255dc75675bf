"""The command: what it refuses at the start, and a whole life as a process."""

import os
import re
import signal
import subprocess
import sys

import pytest
import yaml
from click.testing import CliRunner

from cardwise.core.api.mps import MpsState
from cardwise.gpus import mpsfiles
from cardwise.kube import paths
from mps.__main__ import main
from mps.host import cgroups
from mps.host.processes import CONTROL_PROGRAM, LOCAL
from tests.fakes.apiserver import ApiServer
from tests.mps.mpsnode import DOUBLE, NODE, Node, uuid_of

SECONDS = 60.0  # for a process that has been told to end
COMMAND = [sys.executable, "-m", "mps"]


@pytest.fixture
def api():
    api = ApiServer()
    yield api
    api.close()


@pytest.fixture(autouse=True)
def control_first(python_first, monkeypatch):
    """The double is the program that is found."""
    monkeypatch.setenv("PATH", f"{DOUBLE.parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def kubeconfig(api, folder):
    path = folder / "kubeconfig"
    cluster = {"name": "c", "cluster": {"server": api.serve()}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [cluster],
                "contexts": [context],
                "current-context": "x",
                "users": [{"name": "u", "user": {}}],
            }
        )
    )
    return path


def arguments(node: Node, kubeconfig, **changes: str) -> list[str]:
    options = {
        "node-name": NODE,
        "simulated-gpus": str(node.cards_file),
        "mps-root": str(node.root),
        "kubeconfig": str(kubeconfig),
        "metrics-bind": "127.0.0.1:0",
    } | changes
    return [f"--{name}={setting}" for name, setting in options.items()]


def refused(options: list[str]) -> str:
    done = CliRunner().invoke(main, options)
    assert done.exit_code != 0
    return done.output


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"scope": "rack"}, "'rack' is not one of 'card', 'node'"),
        ({"probe-timeout": "0"}, "0 would replace each daemon at once; write a time such as 3s"),
        ({"audit": "yes"}, "is not one of 'off', 'report', 'evict'"),
        ({"probe-timeout": "soon"}, "is not a duration; write a number with a unit"),
        ({"gpus": "0,0"}, "'0' is listed twice; list each GPU once"),
        ({"stop-daemons": "maybe"}, "is not one of 'idle', 'always', 'never'"),
        ({"mps-root": "/tmp/" + "r" * 90}, "MPS opens no path of more than 87; take a root that is"),
        ({"simulated-gpus": "/no/such/file"}, "no simulated GPUs"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(node, kubeconfig, capfd, wrong, says):
    output = refused(arguments(node, kubeconfig, **wrong))
    output += "".join(capfd.readouterr())
    assert says in " ".join(output.split())


def test_daemons_of_a_former_manager_are_not_left_to_one_without_the_control_program(
    node, kubeconfig, monkeypatch, capfd
):
    """It could neither check nor end them, and pods use them."""
    node.pipe().mkdir(parents=True)
    monkeypatch.setattr(type(LOCAL), "daemons", lambda *_: [node.host.add(CONTROL_PROGRAM)])
    monkeypatch.setenv("PATH", "/nowhere")
    output = refused(arguments(node, kubeconfig)) + "".join(capfd.readouterr())
    assert "MPS daemons of a former manager run (4000), which could be neither checked nor ended" in output


def test_a_mounted_folder_that_is_no_cgroup_file_system_is_refused(node, kubeconfig, folder, monkeypatch, capfd):
    monkeypatch.setattr(cgroups, "HOST_ROOT", folder)
    output = refused(arguments(node, kubeconfig)) + "".join(capfd.readouterr())
    assert f"{folder}: it is not a cgroup file system" in output


def test_a_root_that_other_users_cannot_reach_is_refused(node, kubeconfig, folder, capfd):
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    output = refused(arguments(node, kubeconfig, **{"mps-root": str(closed / "mps")})) + "".join(capfd.readouterr())
    assert f"chmod o+x {closed}" in output


@pytest.mark.parametrize("limit", ["0=1.5G", "0=500K", "0=0M", "GPU-1=5M", "0=1M,0=2M"])
def test_a_limit_that_mps_would_misread_is_refused(node, kubeconfig, capfd, monkeypatch, limit):
    monkeypatch.setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", limit)
    output = refused(arguments(node, kubeconfig)) + "".join(capfd.readouterr())
    assert limit in output
    assert "write <ordinal>=<whole number>M, such as 0=8138M" in output


def test_help_lists_every_setting_with_its_variable():
    output = CliRunner().invoke(main, ["--help"], terminal_width=200).output
    for option in (option for parameter in main.params for option in parameter.opts if option.startswith("--")):
        assert option in output
    assert " ".join(output.split()).count("env var:") >= len(main.params) - 1


@pytest.fixture
def published(api):
    """What the cluster has been told of the card's state."""
    name = uuid_of(0).lower()
    spec = {"uuid": uuid_of(0), "index": 0, "node": NODE}
    card = {"metadata": {"name": name, "labels": {"cardwise.dev/node": NODE}}, "spec": spec}
    api.write_object("/apis/cardwise.dev/v1alpha1/extendedresources", card | {"status": {}})
    return lambda: api.get(paths.extendedresources(name))["status"].get("mps", {}).get("state", "")


@pytest.fixture
def start(node, kubeconfig):
    """The command as a process."""
    started = []

    def start(**environment: str) -> subprocess.Popen[bytes]:
        command = [*COMMAND, *arguments(node, kubeconfig, **{"log-format": "json"})]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for leftover in [*LOCAL.daemons(node.pipe()), *LOCAL.servers(node.pipe())]:
        leftover.signal(signal.SIGKILL)


def test_a_life_from_start_to_sigterm(node, api, published, start):
    process = start(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=1536M", CUDA_VISIBLE_DEVICES="7")
    api.until(lambda: published() == "Ready")
    assert not mpsfiles.unready_reason(node.root, uuid_of(0))
    (daemon,) = LOCAL.daemons(node.pipe())
    process.send_signal(signal.SIGTERM)
    _, output = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert published() == "Down", "its last word"
    assert not daemon.is_alive()
    assert node.mode() == "Default"
    assert not mpsfiles.is_manager_running(node.root)
    server = rf'"event":"fake server \d+ for devices {uuid_of(0)}","card":"{uuid_of(0)}"'
    assert re.search(server.encode(), output), (
        "its own environment does not reach the daemon, and what that says has its card"
    )
    assert b'ignored MPS settings in the manager\'s environment","names":["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"]' in output
    assert b"Traceback" not in output


def test_without_the_control_program_it_is_ready_and_says_that_mps_is_unavailable(node, api, published, start):
    process = start(PATH="/nowhere")
    api.until(lambda: published() == "Unavailable")
    assert not mpsfiles.unready_reason(node.root, uuid_of(0), required_state=MpsState.OFF)
    process.send_signal(signal.SIGTERM)
    _, output = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert published() == "Unavailable", "pods start there without a manager too"
    assert b'"cause":"program"' in output
    assert b"Traceback" not in output


def test_a_manager_whose_root_is_removed_ends_for_the_next(node, api, published, start):
    process = start()
    api.until(lambda: published() == "Ready")
    node.root.rename(node.root.with_name("removed"))  # in one step: the manager writes there
    _, output = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert b"the lock file was removed from the root" in output
    assert b"Traceback" not in output
    start()
    api.until(lambda: not mpsfiles.unready_reason(node.root, uuid_of(0)))

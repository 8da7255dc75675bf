"""The share agent: what the kubelet's probe, the containers and Prometheus see of it."""

import json
import os
import signal
import socket
import subprocess
import sys
from typing import NoReturn

import pytest

from cardwise.core.api import mps, shareagent
from cardwise.core.api.mps import MpsState
from mps.agent import probe
from tests.mps.agent.pods import AGENT, ONE, SECONDS, TWO, Card, Pod, assignment, command, parsed, share

# No program of ours may bring these: each pod would pay for them.
HEAVY = {"structlog", "click", "pydantic", "prometheus_client", "msgspec", "yaml", "kubernetes", "http", "email", "ssl"}
HEAVY |= {"asyncio", "logging", "argparse", "subprocess", "datetime", "_hashlib"}


def test_the_pod_is_held_back_until_its_card_answers(pod, card):
    card.dies().says(state=MpsState.STARTING, reason="its server is not there yet")
    pod.start(assignment(c0=[share()]))
    assert pod.probe() == (1, "MPS on GPU GPU-1 is Starting, not Ready: its server is not there yet\n")
    card.says(state=MpsState.READY)
    code, message = pod.later().probe()
    assert code == 1
    assert "takes no connection" in message
    card.runs()
    assert pod.later().probe() == (0, "")


def test_a_probe_that_asks_for_a_while_lets_the_pod_go_on_as_soon_as_its_card_answers(pod, card):
    card.says(state=MpsState.STARTING, reason="its server is not there yet")
    pod.start(assignment(c0=[share()]))
    looks = 0

    def soon() -> None:
        nonlocal looks
        looks += 1
        if looks <= 3:
            card.says(state=MpsState.STARTING if looks < 3 else MpsState.READY)
            pod.later()

    code, _ = pod.probe(tries=10_000, meanwhile=soon)
    assert code == 0
    assert looks >= 3


def test_where_mps_cannot_run_the_pod_goes_on_without_it(pod, card):
    card.dies().says(state=MpsState.STARTING)
    pod.start(assignment(c0=[share()]))
    assert not pod.ready()
    card.says(state=MpsState.UNAVAILABLE, reason="the control program is missing")
    assert pod.later().probe() == (0, "")
    assert pod.document("0")["enforced"] == "advisory"


def test_it_waits_for_every_card_of_the_pod(pod, card, other):
    other.says(state=MpsState.FAULT)
    pod.start(assignment(c0=[share(ONE)], c1=[share(TWO)]))
    assert "GPU-2 is Fault" in pod.get("/readyz")[1]
    other.says(state=MpsState.READY)
    card.says(state=MpsState.DOWN)
    assert "GPU-1 is Down" in pod.later().get("/readyz")[1]
    card.says(state=MpsState.READY)
    assert pod.later().ready()


def test_who_waits_for_nothing_starts_at_once(pod):
    pod.start(assignment(c0=[share()]), wait=False)
    assert pod.probe() == (0, "")
    assert pod.document("0")["enforced"] == "advisory"


def test_each_container_is_told_its_own(pod, card):
    pod.start(assignment(c0=[share()], init_1=[share(ONE, 1000)]))
    assert pod.document("0") == {
        "card": 1,
        "uuid": ONE,
        "limitMiB": 8138,
        "totalMiB": 16276,
        "fraction": 0.5,
        "enforced": "mps",
    }
    assert pod.document("init-1")["limitMiB"] == 1000
    for key in ("0", "init-1"):
        status, body = pod.get("/share", key)
        assert (status, json.loads(body)) == (200, pod.document(key))
    env = {"CARDWISE_SHARE_FILE": str(pod.folder / "0" / "share.json"), "PATH": os.environ["PATH"]}
    output = subprocess.check_output([sys.executable, "-m", "cardwise.share"], env=env, text=True)
    assert "8138 MiB (7.95 GiB) of 16276 MiB" in output
    assert "by MPS" in output


def test_what_breaks_later_takes_nothing_back(pod, card):
    pod.start(assignment(c0=[share()]))
    assert pod.ready()
    card.dies().says(state=MpsState.DOWN, reason="the daemon died")
    assert pod.later().get("/readyz") == (200, "MPS on GPU GPU-1 is Down, not Ready: the daemon died\n"), (
        "containers run"
    )
    (card.home / mps.READY_FILE).write_text("garbage")
    assert "does not serve" in pod.later().get("/readyz")[1]
    assert pod.document("0")["enforced"] == "mps"
    card.runs().says(state=MpsState.READY, reason="", checked=pod.clock.now())
    assert pod.later().get("/readyz")[1] == "ok\n"


def test_a_card_that_is_switched_off_is_told(pod, card):
    pod.start(assignment(c0=[share()]))
    assert pod.document("0")["enforced"] == "mps"
    card.says(state=MpsState.OFF)
    pod.later()
    assert pod.document("0")["enforced"] == "advisory"


def test_a_killed_agent_comes_back_over_what_it_left(pod, card):
    pod.start(assignment(c0=[share()]))
    before = pod.document("0")
    pod.close()
    (pod.folder / "0" / ".share.json").write_text("half a fi")
    (pod.folder / "0" / "share.json").write_text("damage")
    assert pod.again().ready()
    assert pod.document("0") == before
    assert pod.get("/share", "0")[0] == 200


def test_an_agent_that_restarts_while_mps_is_away_leaves_a_running_pod_ready(pod, card):
    pod.start(assignment(c0=[share()]))
    assert pod.ready()
    card.dies().says(state=MpsState.DOWN, reason="the MPS manager has stopped")
    code, body = pod.again().get("/readyz")
    assert code == 200
    assert "GPU-1 is Down" in body, "and says what is the matter all the same"
    assert not (pod.folder / "0" / shareagent.STARTED_FILE).exists(), "no container can make or see it"


def test_an_agent_that_restarts_before_the_pod_has_started_goes_on_waiting(pod, card):
    card.says(state=MpsState.STARTING)
    pod.start(assignment(c0=[share()]))
    assert not pod.again().ready()


def test_it_keeps_trying_to_write(pod, card, capfd):
    (pod.folder / "0").write_text("in the way")
    pod.start(assignment(c0=[share()]))
    assert "failed to write" in capfd.readouterr().err
    assert pod.ready()
    (pod.folder / "0").unlink()
    pod.later()
    assert pod.document("0")["limitMiB"] == 8138
    assert pod.get("/share", "0")[0] == 200


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /share HTTP/1.1\r\n\r\n", 404),  # nobody's own socket
        (b"GET /other?x=1 HTTP/1.1\r\n\r\n", 404),
        (b"GET /readyz?x=1 HTTP/1.0\r\n\r\n", 200),
        (b"POST /readyz HTTP/1.1\r\n\r\n", 405),
        (b"\x00\xff\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
    ],
)
def test_strange_requests(pod, card, request_, status):
    pod.start(assignment(c0=[share()]))
    assert parsed(pod.raw(request_))[0] == status


def test_strangers_hold_nobody_up(pod, card):
    pod.start(assignment(c0=[share()]))
    silent = [pod.connected() for _ in range(40)]
    assert pod.get("/readyz")[1], "answered beside forty who say nothing"
    slow = pod.connected()
    slow.sendall(b"GET /readyz HTT")
    assert pod.get("/readyz")[1]
    slow.sendall(b"P/1.1\r\n\r\n")
    assert parsed(pod.answered(slow))[0] == 200
    flood = pod.connected()
    with pytest.raises(ConnectionError):
        pour(pod, flood)
    assert pod.get("/readyz")[1]
    for client in [*silent, slow, flood]:
        client.close()


def pour(pod: Pod, into: socket.socket) -> NoReturn:
    while True:
        into.send(b"x" * 1000)
        pod.serve()


def test_who_says_nothing_is_dropped_after_some_seconds(pod, card):
    pod.start(assignment(c0=[share()]))
    silent = pod.connected()
    pod.clock.advance(4.9)
    pod.serve()
    silent.setblocking(False)
    with pytest.raises(BlockingIOError):
        silent.recv(1)
    pod.clock.advance(0.2)
    pod.serve()
    assert silent.recv(1) == b""
    silent.close()


def test_the_hook_of_frameworks_is_laid_out_before_the_pod_starts(pod):
    pod.start(assignment(c0=[share()]), wait=False, hook=True)
    assert pod.ready()
    hook = pod.folder / shareagent.HOOK_FOLDER
    environ = {"PYTHONPATH": str(hook), "PATH": os.environ["PATH"]}
    loaded = "import sitecustomize, cardwise.share; print(sitecustomize.__file__)"
    ran = subprocess.run([sys.executable, "-c", loaded], env=environ, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(hook / "sitecustomize.py")
    assert hook.stat().st_mode & 0o777 == 0o755


def test_a_hook_that_cannot_be_laid_out_holds_the_pod_back_and_says_why(pod):
    (pod.folder / shareagent.HOOK_FOLDER).write_text("in the way")
    pod.start(assignment(c0=[share()]), wait=False, hook=True)
    code, message = pod.get("/readyz")
    assert code == 503
    assert "the frameworks' hook cannot be installed" in message
    (pod.folder / shareagent.HOOK_FOLDER).unlink()
    assert pod.later().ready()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_as_a_process_it_serves_and_ends_at_once(pod, number):
    card = Card(pod.root).runs().says()
    with subprocess.Popen(AGENT, env=pod.environment(assignment(c0=[share()])), stderr=subprocess.PIPE) as process:
        assert any(b"may start" in line for line in process.stderr)
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.connect(str(pod.folder / shareagent.SOCKET_FILE))  # somebody who never says anything
        done = command("--probe", env=pod.env)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
        process.send_signal(number)
        assert process.wait(SECONDS) == 0, "no failure"
        client.close()
    card.dies()


def test_as_a_process_that_waits_it_ends_at_once(pod):
    with subprocess.Popen(AGENT, env=pod.environment(assignment(c0=[share()])), stderr=subprocess.PIPE) as process:
        assert b"does not serve" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0


def test_without_an_agent_the_probe_says_so(pod, capsys):
    assert probe.wait_ready({shareagent.FOLDER_ENV: str(pod.folder)}, tries=2, pause=0.0) == 1
    assert "the share agent does not answer" in capsys.readouterr().err


def test_a_setting_that_cannot_be_is_refused_with_the_remedy(pod):
    env = {shareagent.FOLDER_ENV: str(pod.folder), shareagent.ASSIGNMENT_ENV: "{"}
    done = command(env=env)
    assert done.returncode == 2
    line = json.loads(done.stderr)
    assert line["level"] == "error"
    assert "CARDWISE_ASSIGNMENT" in line["error"]
    assert "run the agent only in pods that they have prepared" in line["error"]


def test_it_is_small():
    """What the measured size in docs/measured.md rests on."""
    code = (
        "import sys; sys.modules['_hashlib'] = None\nimport mps.agent.running, mps.agent.__main__\n"
        "print(*{name.partition('.')[0] for name, module in sys.modules.items() if module})"
    )
    # -S: third-party packages are not even found.
    output = subprocess.check_output([sys.executable, "-S", "-c", code], text=True, env={"PYTHONPATH": "."})
    assert set(output.split()) & HEAVY == set()


def test_help_names_every_setting():
    output = command("--help", env={}).stdout
    for name in (shareagent.ASSIGNMENT_ENV, shareagent.WAIT_ENV, "--probe"):
        assert name in output
    refused = command("--verbose", env={})
    assert (refused.returncode, refused.stdout) == (2, "")

"""The agent as a process: what the kubelet's probe, the containers and Prometheus see of it."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from cardwise.core import mps, shareagent
from cardwise.core.mps import State
from tests.mps.agent.pods import ONE, TWO, assignment, command, parsed, received, share
from tests.mps.worlds import eventually

# No program of ours may bring these: each pod would pay for them.
HEAVY = {"structlog", "click", "pydantic", "prometheus_client", "msgspec", "yaml", "kubernetes", "http", "email", "ssl"}
HEAVY |= {"asyncio", "logging", "argparse", "subprocess", "_hashlib"}


def ready(pod) -> None:
    eventually(lambda: pod.ask("/readyz")[0] == 200, "the agent lets the pod start")


def test_the_pod_is_held_back_until_its_card_answers(pod, card):
    card.dies().says(state=State.STARTING, reason="its server is not there yet")
    pod.start(assignment(c0=[share()]))
    code, why = pod.probe()
    assert (code, why) == (1, "MPS on card GPU-1 is Starting, not Ready: its server is not there yet\n")
    card.says(state=State.READY)
    eventually(lambda: "takes no connection" in pod.probe()[1])
    card.runs()
    ready(pod)
    assert pod.probe() == (0, "")


def test_it_waits_for_every_card_of_the_pod(pod, card, other):
    other.says(state=State.FAULT)
    pod.start(assignment(c0=[share(ONE)], c1=[share(TWO)]))
    assert "GPU-2 is Fault" in pod.probe()[1]
    other.says(state=State.READY)
    card.says(state=State.DOWN)
    eventually(lambda: "GPU-1 is Down" in pod.probe()[1])
    card.says(state=State.READY)
    ready(pod)


def test_who_waits_for_nothing_starts_at_once(pod):
    pod.start(assignment(c0=[share()]), wait=False)
    assert pod.probe() == (0, "")
    assert pod.document("0")["enforced"] == "advisory"


def test_without_an_agent_the_probe_says_so(pod):
    pod.env = {shareagent.FOLDER_ENV: str(pod.folder)}
    code, why = pod.probe()
    assert code == 1
    assert "the share agent does not answer" in why


def test_each_container_is_told_its_own(pod, card):
    pod.start(assignment(c0=[share()], init_1=[share(ONE, 1000)]))
    ready(pod)
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
        status, body = pod.ask("/share", key)
        assert (status, json.loads(body)) == (200, pod.document(key))
    env = {"CARDWISE_SHARE_FILE": str(pod.folder / "0" / "share.json"), "PATH": os.environ["PATH"]}
    said = subprocess.check_output([sys.executable, "-m", "cardwise.share"], env=env, text=True)
    assert "8138 MiB (7.95 GiB) of 16276 MiB" in said
    assert "by MPS" in said


def test_what_breaks_later_takes_nothing_back(pod, card):
    pod.start(assignment(c0=[share()]))
    ready(pod)
    card.dies().says(state=State.DOWN, reason="the daemon died")
    eventually(lambda: 'cardwise_share_mps_usable{uuid="GPU-1"} 0' in pod.ask("/metrics")[1])
    assert pod.probe()[0] == 0, "containers run already"
    assert pod.ask("/readyz") == (200, "MPS on card GPU-1 is Down, not Ready: the daemon died\n")
    (card.home / mps.READY).write_text("garbage")
    eventually(lambda: "does not serve" in pod.ask("/readyz")[1])
    assert pod.document("0")["enforced"] == "mps"
    card.runs().says(state=State.READY, reason="")
    eventually(lambda: pod.ask("/readyz")[1] == "ok\n")


def test_a_card_that_is_switched_off_is_told(pod, card):
    pod.start(assignment(c0=[share()]))
    pod.told_enforced("0", "mps")
    card.says(state=State.OFF)
    pod.told_enforced("0", "advisory")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("state", [State.READY, State.DOWN])
def test_the_end_is_at_once_and_no_failure(pod, card, state, number):
    card.says(state=state)
    pod.start(assignment(c0=[share()]))
    client = pod.connected()  # somebody who never says anything
    assert pod.end(number) == 0
    client.close()


def test_a_killed_agent_comes_back_over_what_it_left(pod, card):
    pod.start(assignment(c0=[share()]))
    ready(pod)
    before = pod.document("0")
    pod.end(signal.SIGKILL)
    (pod.folder / "0" / ".share.json").write_text("half a fi")
    (pod.folder / "0" / "share.json").write_text("damage")
    pod.again()
    ready(pod)
    assert pod.document("0") == before
    assert pod.ask("/share", "0")[0] == 200


def test_an_agent_that_restarts_while_mps_is_away_leaves_a_running_pod_ready(pod, card):
    pod.start(assignment(c0=[share()]))
    ready(pod)
    pod.end(signal.SIGKILL)
    card.dies().says(state=State.DOWN, reason="the MPS manager has stopped")
    pod.again()
    code, body = pod.ask("/readyz")
    assert code == 200
    assert "GPU-1 is Down" in body, "and says what is the matter all the same"
    assert pod.probe()[0] == 0
    assert not (pod.folder / "0" / shareagent.STARTED).exists(), "no container can make or see it"


def test_an_agent_that_restarts_before_the_pod_has_started_goes_on_waiting(pod, card):
    card.says(state=State.STARTING)
    pod.start(assignment(c0=[share()]))
    pod.end(signal.SIGKILL)
    pod.again()
    assert pod.probe()[0] == 1


def test_a_setting_that_cannot_be_is_refused_with_the_remedy(pod):
    env = {shareagent.FOLDER_ENV: str(pod.folder), shareagent.ASSIGNMENT_ENV: "{"}
    done = command(env=env)
    assert done.returncode == 2
    line = json.loads(done.stderr)
    assert line["level"] == "error"
    assert "CARDWISE_ASSIGNMENT" in line["error"]
    assert "run the agent where they put it" in line["error"]


def test_a_port_that_is_taken_is_the_apps(pod, card):
    with socket.create_server(("", 0)) as app:
        port = app.getsockname()[1]
        pod.start(assignment(c0=[share()]), port=port)
        ready(pod)
        assert f"cannot listen at {port}" in pod.log.read_text()
    eventually(lambda: "cardwise_share_limit_bytes" in scraped(port), "heard once the port is free")


def scraped(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            return str(answer.read().decode())
    except OSError:
        return ""


def test_it_keeps_trying_to_write(pod, card):
    (pod.folder / "0").write_text("in the way")
    pod.start(assignment(c0=[share()]))
    eventually(lambda: "cannot be written" in pod.log.read_text())
    ready(pod)
    (pod.folder / "0").unlink()
    eventually((pod.folder / "0" / "share.json").exists)
    eventually((pod.folder / "0" / shareagent.SOCKET).exists)


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
    ready(pod)
    assert parsed(pod.raw(request_))[0] == status


def test_strangers_hold_nobody_up(pod, card):
    pod.start(assignment(c0=[share()]))
    silent = [pod.connected() for _ in range(40)]
    assert pod.ask("/readyz")[1], "answered beside forty who say nothing"
    slow = pod.connected()
    slow.sendall(b"GET /readyz HTT")
    assert pod.ask("/readyz")[1]
    slow.sendall(b"P/1.1\r\n\r\n")
    assert parsed(received(slow))[0] in (200, 503)
    flood = pod.connected()
    with pytest.raises(OSError):
        flood.sendall(b"x" * 10_000_000)
    assert pod.ask("/readyz")[1]
    for client in [*silent, slow, flood]:
        client.close()


def test_it_is_small():
    """What the measured size in docs/measured.md rests on."""
    code = (
        "import sys; sys.modules['_hashlib'] = None\nimport mps.agent.running, mps.agent.__main__\n"
        "print(*{name.partition('.')[0] for name, module in sys.modules.items() if module})"
    )
    # -S: third-party packages are not even found.
    said = subprocess.check_output([sys.executable, "-S", "-c", code], text=True, env={"PYTHONPATH": "."})
    assert set(said.split()) & HEAVY == set()


def test_help_names_every_setting():
    said = command("--help", env={}).stdout
    for name in (shareagent.ASSIGNMENT_ENV, shareagent.WAIT_ENV, shareagent.METRICS_PORT_ENV, "--probe"):
        assert name in said
    refused = command("--verbose", env={})
    assert (refused.returncode, refused.stdout) == (2, "")


def test_the_hook_of_frameworks_is_laid_out_before_the_pod_starts(pod):
    pod.start(assignment(c0=[share()]), wait=False, hook=True)
    assert pod.probe() == (0, "")
    hook = pod.folder / shareagent.HOOK
    environ = {"PYTHONPATH": str(hook), "PATH": os.environ["PATH"]}
    loaded = "import sitecustomize, cardwise.share; print(sitecustomize.__file__)"
    ran = subprocess.run([sys.executable, "-c", loaded], env=environ, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(hook / "sitecustomize.py")
    assert hook.stat().st_mode & 0o777 == 0o755


def test_a_hook_that_cannot_be_laid_out_holds_the_pod_back_and_says_why(pod):
    (pod.folder / shareagent.HOOK).write_text("in the way")
    pod.start(assignment(c0=[share()]), wait=False, hook=True)
    code, why = pod.probe()
    assert code == 1
    assert "the frameworks' hook cannot be laid out" in why
    (pod.folder / shareagent.HOOK).unlink()
    ready(pod)

"""`cardwise top`: the screens as golden output, what is read for them, and what is said where nobody knows."""

import json
import math
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import Result

from cardwise.cli.cluster import usage
from cardwise.cli.commands import top
from cardwise.cli.render import livescreen, toptable
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from tests.cli import clusters
from tests.cli.clusters import K80, Cluster, allocated, card, device, placed, sharing_within
from tests.fakes.apiserver import Fault
from tests.fakes.clock import FakeClock

METRICS = """\
# HELP cardwise_container_gpu_memory_used_bytes Memory
# TYPE cardwise_container_gpu_memory_used_bytes gauge
cardwise_container_gpu_memory_used_bytes{UUID="GPU-n1-0",container="main",namespace="team-a",pod="train"} 2.8311552e+09
cardwise_container_gpu_memory_used_bytes{UUID="GPU-n1-0",container="",namespace="team-a",pod="train"} 1.048576e+06
cardwise_container_gpu_memory_used_bytes{UUID="GPU-n1-0",container="main",namespace="team-b",pod="serve"} 5.24288e+08
cardwise_mps_up{gpu="GPU-n1-0"} 1
"""


SCREEN = """\
6 GPUs on 2 nodes: 14441 of 68646 MiB granted (21%), 1 unhealthy, 1 cordoned

NODE  GPU  MODEL      GRANTED             USED-MIB  GRANTED-MIB  TOTAL-MIB  CORE  PODS  STATE               ISOLATION  HOLDERS(USED/GRANTED)
n2    0    Tesla K80  [##########]  100%  -         11441        11441      100%  1     whole               -          team-a/all -/11441
n2    1    Tesla K80  [..........]  0%    -         0            11441      0%    0     cordoned            -          -
n2    2    Tesla K80  [..........]  0%    -         0            11441      0%    0     unhealthy,MPS-Down  -          -
n2    3    Tesla K80  [#.........]  0%    -         100          11441      -     -     ok                  -          team-a/new -/100
n1    0    Tesla K80  [##........]  21%   3201      2500         11441      30%   2     ok                  mps        team-a/train 2701/1500!, team-b/serve 500/1000
n1    1    Tesla K80  [#.........]  4%    -         500          11441      0%    1     ok                  -          team-b/gone -/500 (terminating)
"""  # noqa: E501


LIMITED = {"memory": "mps", "memoryReason": "an old driver", "compute": "mps", "computeReason": ""}
CARDS, PODS, PARTS = paths.extendedresources(), paths.pods(), paths.pods("cardwise-system")
MANAGED = {"app.kubernetes.io/name": "cardwise", "app.kubernetes.io/component": "mps"}


def monitored_cluster(cards: list[Json], pods: list[Json], managers: Mapping[str, object]) -> Cluster:
    """`managers`: by node, how the MPS manager's metrics are answered through the proxy."""
    api = Cluster({"extendedresources": cards, "pods": pods})
    for node, metrics in managers.items():
        metadata = {"namespace": "cardwise-system", "name": f"mps-{node}", "labels": MANAGED}
        api.add("pods", {"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": "Running"}})
        api.answers[f"{PARTS}/mps-{node}:9400/proxy/metrics"] = metrics
    return api


def list_requests(api: Cluster) -> list[str]:
    """What was listed, with the selectors. Each is from the API server's cache, and in one piece."""
    lists = api.sent("list")
    assert all(call.query["resourceVersion"] == "0" and "limit" not in call.query for call in lists)
    selectors = ("labelSelector", "fieldSelector")
    return [
        " ".join([call.path, *(call.query[selector] for selector in selectors if selector in call.query)])
        for call in lists
    ]


def cordoned(resource: Json) -> Json:
    return resource | {"spec": resource["spec"] | {"unschedulable": True}}


@pytest.fixture
def api() -> Cluster:
    """n1 has a manager; n2's second card is cordoned, its third sick, and its fourth has not been told of."""
    held = [{"podUID": "x", "namespace": "team-b", "name": "gone", "memoryMiB": 500, "container": "0"}]
    ended = allocated(card("n1", 1), 500)
    ended["status"]["reported"] = held
    down = card("n2", 2, health="Unhealthy")
    down["status"] |= {"reason": "Xid 79", "mps": {"mode": "card", "state": "Down"}}
    limited = allocated(card("n1", 0), 2500, 2, core=30)
    limited["status"]["isolation"] = LIMITED
    cards = [
        limited,
        ended,
        allocated(card("n2", 0), K80, 1, core=100, whole=True),
        cordoned(allocated(card("n2", 1), 0, 0)),
        allocated(down, 0, 0),
        card("n2", 3),
        device("n2", 0),
    ]
    pods = [
        placed("team-a", "train", "n1", 0, 1500, core=30),
        placed("team-b", "serve", "n1", 0, 1000),
        placed("team-a", "all", "n2", 0, K80, core=100),
        placed("team-a", "new", "n2", 3, 100),
        placed("team-a", "done", "n2", 3, 100) | {"status": {"phase": "Succeeded"}},
    ]
    return monitored_cluster(cards, pods, {"n1": METRICS.encode()})


def run(monkeypatch: pytest.MonkeyPatch, api: Cluster, *args: str) -> Result:
    return clusters.run(monkeypatch, api, "top", *args)


def test_the_screen(monkeypatch, api):
    completed = run(monkeypatch, api)
    assert completed.exit_code == 0, completed.output
    assert completed.stdout == SCREEN


def test_programs_get_all_of_it_and_null_for_what_nobody_knows(monkeypatch, api):
    document = json.loads(run(monkeypatch, api, "-o", "json").stdout)
    assert document == yaml.safe_load(run(monkeypatch, api, "-o", "yaml").stdout)
    assert (document["gpus"], document["nodeCount"], document["grantedMiB"], document["cordonedGPUs"]) == (
        6,
        2,
        14441,
        1,
    )
    n2, n1 = document["nodes"]
    assert (n2["name"], n1["name"]) == ("n2", "n1")
    assert n1["gpus"][0]["holders"][0] == {
        "namespace": "team-a", "name": "train", "grantedMiB": 1500, "usedMiB": 2701, "terminating": False,
    }  # fmt: skip
    assert (n1["gpus"][0]["isolation"], n2["gpus"][0]["isolation"]) == (LIMITED, None)
    assert (n2["gpus"][0]["usedMiB"], n2["gpus"][0]["holders"][0]["usedMiB"]) == (None, None)
    assert (n2["gpus"][2]["healthy"], n2["gpus"][2]["reason"], n2["gpus"][2]["mps"]) == (False, "Xid 79", "Down")
    assert (n2["gpus"][3]["corePercent"], n2["gpus"][3]["grantedMiB"]) == (None, 100)


def test_a_gpu_that_pods_of_one_namespace_share_says_whose_it_is(monkeypatch):
    cards = [allocated(card("n1", 0), 100), allocated(card("n1", 1), K80, core=100, whole=True)]
    pods = [placed("team-a", "apart", "n1", 0, 100), placed("team-a", "all", "n1", 1, K80, core=100)]
    api = monitored_cluster(cards, [*map(sharing_within, pods)], {})
    shared, whole = run(monkeypatch, api).stdout.splitlines()[3:5]
    assert "  only:team-a  " in shared
    assert "  whole  " in whole, "nobody else gets it anyway"
    (node,) = json.loads(run(monkeypatch, api, "-o", "json").stdout)["nodes"]
    assert [gpu["onlyNamespace"] for gpu in node["gpus"]] == ["team-a", None]


def test_the_most_used_nodes_come_first_and_the_rest_is_counted(monkeypatch, api):
    output = run(monkeypatch, api, "--limit", "1").stdout
    assert output.startswith("6 GPUs on 2 nodes")
    assert "n2    0" in output
    assert "n1" not in output
    assert output.endswith(
        "1 more node with lower use; --limit shows more, NODE shows one\n"
        "note: usage not measured: namespace cardwise-system has no pod of an MPS manager on these nodes\n"
    )
    assert f"{PODS} spec.nodeName=n1" not in list_requests(api), "pods of shown nodes only"


def test_one_node_and_one_that_is_not_there(monkeypatch, api):
    output = run(monkeypatch, api, "n1", "--limit", "1").stdout
    assert "n2" not in output
    assert output.startswith("2 GPUs on 1 node: 3000 of 22882 MiB granted")
    refused = run(monkeypatch, api, "n1", "n3")
    assert refused.exit_code == 1
    assert "no GPU that Cardwise shares on n3" in refused.stderr


def test_many_nodes_are_one_request(monkeypatch):
    api = monitored_cluster([card(f"n{i}", 0) for i in range(70)], [placed("a", "p", "n7", 0, 5)], {})
    output = run(monkeypatch, api, "--limit", "0").stdout
    assert "a/p -/5" in output
    assert [path for path in list_requests(api) if path.startswith(PODS)] == [PODS]


def test_what_may_not_be_read_is_said(monkeypatch, api):
    api.kube.namespace = "team-b"
    api.forbid("pods of all")
    output = run(monkeypatch, api).stdout
    assert "note: you may not read the pods of all namespaces: only your own pods are shown as holders\n" in output
    assert "team-a" not in output
    assert "team-b/serve 500/1000" in output
    api.forbid("pods")
    output = run(monkeypatch, api).stdout
    assert "note: you may not read the pods of all namespaces: the holders are not shown\n" in output
    assert "team-b/serve" not in output
    api.forbid()
    forbidden = api.fault(Fault(status=403), "list", PARTS, times=math.inf)
    output = run(monkeypatch, api).stdout
    assert "usage not measured: the MPS managers cannot be listed in namespace cardwise-system: " in output
    assert "no pod of an MPS manager" not in output
    assert "team-a/train -/1500" in output
    forbidden.end()
    api.forbid("extendedresources", "resourceclasses", "pods")
    assert isinstance(run(monkeypatch, api).exception, errors.Forbidden)


def test_a_manager_that_may_not_be_asked_or_does_not_answer_is_told(monkeypatch, api):
    api.fault(Fault(status=403, message='User "jane" cannot get resource "pods/proxy"'), "get", "*/proxy/*")
    output = run(monkeypatch, api).stdout
    assert 'note: usage is unknown for some nodes: User "jane" cannot get resource "pods/proxy"\n' in output
    assert "team-a/train -/1500" in output


def test_a_cluster_without_cards(monkeypatch):
    assert (
        "no GPU is shared: run `cardwise doctor` for the cause"
        in run(monkeypatch, monitored_cluster([], [], {})).stdout
    )


def test_a_program_looks_once(monkeypatch, api):
    refused = run(monkeypatch, api, "-o", "json", "--watch")
    assert refused.exit_code == 2
    assert "prints once, for programs: remove --watch" in refused.stderr


def test_gpushares_pods_hold_a_card_by_its_index():
    old = placed("a", "old", "n1", 0, 5)
    annotations = {"ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_POD": "5", "ALIYUN_COM_GPU_MEM_DEV": str(K80)}
    old["metadata"]["annotations"] = annotations
    look = top.TopView(monitored_cluster([card("n1", 0)], [old], {}).kube)
    look.refresh()
    assert "a/old -/5" in look.render_screen()


@pytest.mark.parametrize(
    ("part", "whole", "drawn"),
    [(0, 100, "[..........]"), (1, 100, "[#.........]"), (99, 100, "[#########.]"), (100, 100, "[##########]"),
     (120, 100, "[##########]"), (0, 0, "[..........]")],
)  # fmt: skip
def test_bars(part, whole, drawn):
    assert toptable.draw_bar(part, whole) == drawn


def test_a_big_cluster_is_looked_at_as_a_whole_only_now_and_then(monkeypatch, api, clock):
    monkeypatch.setattr(top, "_BIG_CLUSTER_CARDS", 3)
    look = top.TopView(api.kube, limit=1, clock=clock)
    for later, expected in ((0, CARDS), (3, f"{CARDS} cardwise.dev/node in (n2)"), (37, CARDS)):
        clock.advance(later)
        before = len(list_requests(api))
        look.refresh()
        assert list_requests(api)[before] == expected
        assert "team-a/all" in look.render_screen()


def test_the_live_screen_follows_and_ends_with_ctrl_c(monkeypatch, api, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "12")
    looks = []

    class Clock(FakeClock):
        def sleep(self, seconds: float) -> None:
            looks.append(seconds)
            if len(looks) == 1:
                api.change("extendedresources", "gpu-n1-0", status={"allocated": {"memoryMiB": 2600}})
            elif len(looks) == 2:
                api.forbid("extendedresources")
            else:
                raise KeyboardInterrupt

    top.show_live(top.TopView(api.kube), 5.0, Clock())
    _, _, first, second, third = capsys.readouterr().out.split("\x1b[H")
    assert looks == [5.0] * 3
    assert "14441 of 68646" in click.unstyle(first)
    assert "14541 of 68646" in click.unstyle(second)
    assert "outdated" in click.unstyle(third)
    assert third.endswith("\x1b[?25h\x1b[?1049l"), "the terminal is as it was"
    assert all(len(row) <= 60 for row in click.unstyle(second).splitlines())
    assert len(first.splitlines()) <= 12


PATIENCE = 60.0  # seconds: only decides how late a broken test fails

# A shell starts what it runs in the background with SIGINT ignored, and this would be inherited.
LIVE = """
import fcntl, signal, termios
signal.signal(signal.SIGINT, signal.default_int_handler)
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
from cardwise.cli.commands import top
from tests.cli.clusters import Cluster, card
top.show_live(top.TopView(Cluster({"extendedresources": [card("n1", 0)]}).kube), 600.0)
"""


@contextmanager
def typing(stdin: int | None = None) -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    """A person's end of a terminal, on which the live screen has been drawn, and the program. `stdin`: its standard
    input; None: that terminal.
    """
    person, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    program = subprocess.Popen(
        [sys.executable, "-c", LIVE],
        stdin=terminal if stdin is None else stdin,
        stdout=terminal,
        cwd=Path(__file__).parents[3],
        env=os.environ | {"TERM": "xterm"},
        start_new_session=True,
    )
    try:
        read_until(person, b"n1 ")
        yield person, program
        read_until(person, b"\x1b[?1049l")  # the screen is as it was
        program.wait(PATIENCE)
        assert termios.tcgetattr(terminal) == before
    finally:
        program.kill()
        program.wait(PATIENCE)
        os.close(person)
        os.close(terminal)


def read_until(person: int, text: bytes) -> None:
    shown, until = b"", time.monotonic() + PATIENCE
    while text not in shown:
        remaining = max(0.0, until - time.monotonic())
        assert select.select([person], [], [], remaining)[0], f"no {text!r} after {shown!r}"
        shown += os.read(person, 65536)


def test_a_signal_that_comes_just_before_a_wait_for_a_key_is_not_kept_waiting(monkeypatch):
    """It interrupts no `select` that has not begun yet, and Python runs its handler once that has ended."""
    clock, waits = FakeClock(), []

    def nobody_types(*args: Any) -> tuple[list, list, list]:
        waits.append(args[3])
        clock.sleep(args[3])
        return [], [], []

    monkeypatch.setattr(livescreen.select, "select", nobody_types)
    assert not livescreen.Keyboard(0, clock).wait_for_key("q", 600.0)
    assert max(waits) <= 1.0
    assert sum(waits) == pytest.approx(600.0)


@pytest.mark.parametrize("keys", [b"xQ", b"\x03"], ids=["q", "Ctrl-C"])
def test_a_key_ends_the_live_screen_and_the_terminal_is_as_it_was(keys):
    with typing() as (person, program):
        os.write(person, keys)
    assert program.returncode == 0


def test_a_signal_leaves_the_terminal_as_it_was():
    with typing() as (_, program):
        program.terminate()
    assert program.returncode == 128 + signal.SIGTERM


def test_with_a_pipe_as_input_nothing_is_read_and_ctrl_c_ends_the_live_screen():
    end, other = os.pipe()
    os.write(other, b"q")
    try:
        with typing(end) as (person, program):
            assert program.poll() is None, "the pipe is not for it"
            os.write(person, b"\x03")
        assert program.returncode == 0
        assert os.read(end, 9) == b"q"
    finally:
        os.close(end)
        os.close(other)


def test_what_is_wrong_is_red_and_no_word_differs_from_what_is_printed_once():
    drawn = livescreen.color_text(SCREEN)
    assert drawn.plain == SCREEN
    red = {SCREEN[span.start : span.end] for span in drawn.spans if span.style == "red"}
    assert red == {"unhealthy", "MPS-Down", "2701/1500!"}


def test_only_a_live_screen_loads_rich():
    loaded = "import sys, cardwise.cli.main; print('rich' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout == "False\n"
    )


def test_what_is_wrong_from_the_start_does_not_open_a_screen(api, capsys):
    with pytest.raises(click.ClickException):
        top.show_live(top.TopView(api.kube, nodes=["n9"]), 1.0)
    assert capsys.readouterr().out == ""


def test_containers_of_a_pod_are_added_up():
    assert usage.parse_usage(METRICS) == {
        ("team-a", "train", "GPU-n1-0"): 2701,
        ("team-b", "serve", "GPU-n1-0"): 500,
    }


USED_BYTES = "cardwise_container_gpu_memory_used_bytes"


@pytest.mark.parametrize("character", ["\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"])
def test_only_a_line_feed_ends_a_sample(monkeypatch, api, character):
    labels = f'UUID="GPU-n1-0",namespace="team-b",pod="serve",workload="Foo/a{character}{USED_BYTES}b"'
    api.answers[f"{PARTS}/mps-n1:9400/proxy/metrics"] = f"{METRICS}{USED_BYTES}{{{labels}}} 0\n".encode()
    completed = run(monkeypatch, api)
    assert (completed.exit_code, completed.stdout) == (0, SCREEN)


@pytest.mark.parametrize(
    "line",
    [
        *(f'{USED_BYTES}{{namespace="a"}} {number}' for number in ("NaN", "+Inf", "-Inf", "1e400", "-1", "1e300", "x")),
        f'{USED_BYTES}{{namespace="a"}} {"9" * 5000}',
        f'{USED_BYTES}{{namespace="a}} 1',
        f'{USED_BYTES}{{namespace="a",namespace="b"}} 1',
        f'{USED_BYTES}{{namespace=" }} 1',
        f"{USED_BYTES}{{",
        f"{USED_BYTES}}}",
        USED_BYTES,
        f'{USED_BYTES}{{pod="' + '\\"' * 500_000 + '"} 1',
    ],
)
@pytest.mark.timeout(20)
def test_metrics_that_cannot_be_read_leave_the_use_of_their_node_unknown(monkeypatch, api, line):
    api.answers[f"{PARTS}/mps-n1:9400/proxy/metrics"] = f"{METRICS}{line}\n".encode()
    completed = run(monkeypatch, api)
    assert completed.exit_code == 0, completed.output
    assert "team-a/train -/1500, team-b/serve -/1000" in completed.stdout
    assert "usage is unknown for some nodes: MPS manager mps-n1 sent unreadable metrics" in completed.output
    assert len(completed.output) < 3000


NARROW = """\
6 GPUs on 2 nodes: 14441 of 68646 MiB granted (21%), 1 unhealthy, 1 cordoned

NODE  GPU  STATE               GRANTED/TOTAL  HOLDERS(USED/GRANTED)
n2    0    whole               11441/11441    team-a/all -/11441
n2    1    cordoned            0/11441        -
n2    2    unhealthy,MPS-Down  0/11441        -
n2    3    ok                  100/11441      team-a/new -/100
n1    0    ok                  2500/11441     team-a/train 2701/1500!, team-b/s…
n1    1    ok                  500/11441      team-b/gone -/500 (terminating)
"""


def test_eighty_columns_show_what_matters(api):
    look = top.TopView(api.kube)
    look.refresh()
    assert look.render_screen(80) == NARROW
    assert max(map(len, look.render_screen(80).splitlines())) <= 80
    assert look.render_screen(200) == look.render_screen() == SCREEN

"""Tenants of one real card: their limits, what they do to each other, and how long the card takes to heal."""

import contextlib
import queue
import signal
import time
from pathlib import Path

import pytest

from cardwise.core.api import mps
from cardwise.gpus.protocol import ComputeMode
from mps.host import cgroups
from mps.host.cgroups import CgroupMembership
from mps.host.processes import LOCAL
from tests.realcard.machine import Tenant, closes_the_card, eventually

OUT_OF_MEMORY = 2
TERMINATED = 810  # CUDA_ERROR_MPS_CLIENT_TERMINATED
GRANULARITY = 2  # multiprocessors come in pairs
HEALED_SECONDS = 30.0
NOBODY = 65534
FEW_BLOCKS = 8  # of a small inference: one tenant leaves most of the card idle
ALL_BLOCKS = 4096  # of a training: more than any card has room for at once
WORK_SECONDS = 10.0
SMALL = (256, 512, 544, 576, 640, 768, 1024)


@pytest.mark.parametrize("mib", [2048, 4000, 8138])
def test_a_tenant_cannot_allocate_over_its_limit(machine, measured, mib):
    if mib * 2 > machine.card.memory:
        pytest.skip(f"the card has {machine.card.memory} MiB only")
    machine.bind("neighbour", mib * 2)  # the card's ceiling is above
    machine.start()
    machine.wait_ready(mib * 2)
    answer = machine.tenant("fill", mib=mib).heard(120.0)
    assert answer["error"] == OUT_OF_MEMORY
    assert answer["allocated"] <= mib, "never over the limit"
    assert abs(answer["allocated"] - answer["free"]) <= mib / 100, (
        "refused within one percent of what CUDA said was free"
    )
    measured(
        f"limit {mib} MiB", f"{answer['allocated']} MiB allocated, {answer['free']} free of {answer['total']} told"
    )


def test_a_process_that_drops_its_limit_meets_the_cards_ceiling(machine, measured):
    machine.share("largest", 4000)
    answer = machine.tenant("fill").heard(120.0)
    assert answer["error"] == OUT_OF_MEMORY
    assert answer["allocated"] <= mps.ceiling_of_shares([4000])
    measured("no limit of its own, ceiling 4096 MiB", f"{answer['allocated']} MiB allocated")


@closes_the_card
def test_a_process_without_mps_finds_the_card_closed(machine, measured):
    machine.start()
    assert machine.gpus.compute_mode(machine.card.uuid) is ComputeMode.EXCLUSIVE_PROCESS
    machine.tenant("busy", 1).heard()
    answer = machine.tenant("see", through=False).heard()
    assert answer.get("error"), "it got a context"
    measured("a process without MPS", f"CUDA error {answer['error']}")


def test_a_key_of_a_card_that_is_not_there(machine, measured):
    """What a key of an unknown card does is only measured, since we never write one."""
    machine.share("largest", 4000)
    tenant = machine.tenant("fill", mib=1024)
    limited = tenant.heard(120.0)["allocated"]
    tenant.close()
    lifted = machine.tenant("fill", env={mps.LIMIT_ENV: "0=1024M,1=1024M"}).heard(120.0)["allocated"]
    measured("limits 0=1024M,1=1024M with one card", f"{lifted} MiB allocated; with 0=1024M {limited} MiB")


def test_a_running_servers_ceiling_is_raised_for_its_next_clients(machine):
    machine.share("small", 2048)
    early = machine.tenant("grow")
    early.heard()
    (server,) = LOCAL.servers(machine.home / mps.PIPE_FOLDER)
    machine.bind("large", 6000)
    machine.wait_ready(6000)
    assert LOCAL.servers(machine.home / mps.PIPE_FOLDER) == [server], "the same server"
    late = machine.tenant("hold", 5000, mib=6000)
    assert late.heard(60.0) == {"held": 5000, "error": 0}
    early.send_line(1024)
    assert early.heard() == {"error": 0}, "who was there goes on"
    early.send_line(3000)
    assert early.heard() == {"error": OUT_OF_MEMORY}, "and keeps the ceiling that it came under"


@pytest.mark.parametrize("percent", [100, 75, 50, 25, 10])
def test_percentages_give_the_expected_multiprocessors(machine, measured, percent):
    machine.share("pod", 2048)
    whole = machine.tenant("see", percent=100).heard()["sms"]
    sms = machine.tenant("see", percent=percent).heard()["sms"]
    exact = whole * percent / 100
    assert exact - GRANULARITY < sms <= max(exact, GRANULARITY)
    measured(f"{percent} % of {whole} multiprocessors", sms)


def throughput(machine, tenants: int, *, through: bool) -> int:
    """Rounds of all tenants together, who begin at once."""
    percent = 100 // tenants if through else 0
    busy_tenants = [
        machine.tenant("work", FEW_BLOCKS, WORK_SECONDS, percent=percent, through=through) for _ in range(tenants)
    ]
    for tenant in busy_tenants:
        assert tenant.heard(60.0) == {"ready": True}
    for tenant in busy_tenants:
        tenant.send_line()
    answers = [tenant.heard(WORK_SECONDS + 60.0) for tenant in busy_tenants]
    assert all(tenant["error"] == 0 for tenant in answers)
    for tenant in busy_tenants:
        tenant.close()
    return sum(tenant["rounds"] for tenant in answers)


def test_four_tenants_by_mps_against_time_slicing(machine, measured):
    alone = throughput(machine, 1, through=False)
    sliced = throughput(machine, 4, through=False)
    machine.share("pod", 2048)
    served = throughput(machine, 1, through=True)
    shared = throughput(machine, 4, through=True)
    measured("small kernels/s: one alone", round(alone / WORK_SECONDS))
    measured("small kernels/s: one alone through MPS", round(served / WORK_SECONDS))
    measured("small kernels/s: four by time-slicing, in sum", round(sliced / WORK_SECONDS))
    measured("small kernels/s: four through MPS at 25 %, in sum", round(shared / WORK_SECONDS))
    assert shared > sliced


def rounds_beside(machine, neighbour: int, *, through: bool, percent: int = 0) -> dict:
    """How long small rounds take beside a tenant whose kernels have `neighbour` blocks, 0 for nobody."""
    if neighbour:
        training = machine.tenant("busy", neighbour, through=through, percent=percent)
        assert training.heard() == {"ready": True}
    serving = machine.tenant("work", FEW_BLOCKS, WORK_SECONDS, through=through, percent=percent)
    assert serving.heard() == {"ready": True}
    serving.send_line()
    answer = serving.heard(WORK_SECONDS + 60.0)
    assert answer["error"] == 0
    serving.close()
    if neighbour:
        training.close()
    return answer


def test_what_a_neighbour_that_fills_the_card_costs_small_rounds(machine, measured):
    def measure_rounds(label: str, answer: dict) -> None:
        measured(f"a round of a small kernel, p50 and p99 (us): {label}", f"{answer['p50']}, {answer['p99']}")

    measure_rounds("alone", rounds_beside(machine, 0, through=False))
    measure_rounds("beside a full card, time-slicing", rounds_beside(machine, ALL_BLOCKS, through=False))
    machine.share("pod", 2048)
    measure_rounds("alone through MPS", rounds_beside(machine, 0, through=True))
    measure_rounds("beside a full card through MPS", rounds_beside(machine, ALL_BLOCKS, through=True))
    measure_rounds(
        "beside a full card through MPS, 50 % each", rounds_beside(machine, ALL_BLOCKS, through=True, percent=50)
    )


def test_how_small_a_share_may_be(machine, measured):
    """A client's context is within its limit, so a small one has no room for it."""
    machine.share("largest", 2048)
    error = {mib: machine.tenant("see", mib=mib).heard().get("error", 0) for mib in SMALL}
    assert error[SMALL[-1]] == 0
    assert all(code in (0, OUT_OF_MEMORY) for code in error.values())
    measured("CUDA starts through MPS with a limit of", ", ".join(f"{m} MiB: {fate(c)}" for m, c in error.items()))


def busy(machine, count: int, mib: int = 0) -> list[Tenant]:
    """So many tenants that compute, each with this limit."""
    tenants = [machine.tenant("busy", 1, mib=mib) for _ in range(count)]
    for tenant in tenants:
        assert tenant.heard() == {"ready": True}
    return tenants


def test_an_ending_pods_busy_client_is_taken_off_and_its_neighbour_goes_on(machine, measured, monkeypatch):
    machine.share("ending", 2048)
    ending, staying = busy(machine, 2, mib=1024)
    monkeypatch.setattr(
        cgroups, "read_memberships", lambda pid: (CgroupMembership("uid-ending", "c"),) if pid == ending.pid else ()
    )
    began = time.monotonic()
    assert machine.manager.detach(machine.manager.pods.list_pods()) == 1
    assert ending.heard(30.0)["error"] == TERMINATED
    measured("terminate_client of a busy client, until it knows (s)", f"{time.monotonic() - began:.2f}")
    ending.kill()
    staying.finish()
    answer = staying.heard(30.0)
    assert answer["error"] == 0
    assert answer["rounds"] > 0
    assert not machine.problem()


def test_a_tenant_that_crashes_its_neighbours_and_the_way_back(machine, measured):
    machine.share("pod", 2048)
    neighbour = machine.tenant("busy", 1, mib=1024)
    assert neighbour.heard() == {"ready": True}
    assert machine.tenant("crash", mib=1024).heard()["error"] != 0
    began = time.monotonic()
    error = 0
    with contextlib.suppress(queue.Empty):  # then it goes on, which is a result too
        error = neighbour.heard(5.0)["error"]
    neighbour.finish()
    measured("a neighbour of a tenant that crashes", fate(error))
    machine.wait_ready(2048)
    # Ready was perhaps never lost: what counts is that the next tenant computes within its limit.
    eventually(lambda: computes(machine), "no new tenant computes", 60.0)
    measured("after a crash, until a new tenant computes (s)", f"{time.monotonic() - began:.1f}")


def fate(error: int) -> str:
    return f"CUDA error {error}" if error else "goes well"


def computes(machine) -> bool:
    tenant = machine.tenant("work", 1, 0.2, mib=1024)
    if tenant.heard(60.0) != {"ready": True}:
        return False
    tenant.send_line()
    return tenant.heard(60.0)["error"] == 0


def test_a_busy_tenant_that_is_killed_outright(machine, measured):
    """What a kubelet does after the grace period, if nobody detaches the client first."""
    machine.share("pod", 2048)
    victim, neighbour = busy(machine, 2)
    victim.kill()
    time.sleep(5.0)  # for harm to show; nobody says that there is none
    neighbour.finish()
    answer = neighbour.heard(30.0)
    measured("a neighbour of a busy tenant that is killed", fate(answer["error"]))
    machine.wait_ready()
    eventually(lambda: computes(machine), "no new tenant computes", 60.0)


@pytest.mark.parametrize("wound", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("clients", [0, 1])
def test_a_wounded_daemon_is_back_in_time(machine, measured, wound, clients):
    machine.share("pod", 2048)
    busy(machine, clients, mib=1024)
    (daemon,) = LOCAL.daemons(machine.home / mps.PIPE_FOLDER)
    began = time.monotonic()
    daemon.signal(wound)
    machine.wait_not_ready()
    machine.wait_ready(2048)
    seconds = time.monotonic() - began
    measured(f"daemon gets {wound.name} with {clients} busy clients: ready again after (s)", f"{seconds:.1f}")
    assert seconds < HEALED_SECONDS
    assert computes(machine)


@closes_the_card
def test_a_process_past_mps_between_two_servers_keeps_the_card_closed(machine, measured):
    machine.start()
    pipe = machine.home / mps.PIPE_FOLDER
    for process in [*LOCAL.daemons(pipe), *LOCAL.servers(pipe)]:
        process.signal(signal.SIGKILL)
    thief = machine.tenant("hold", 64, through=False)
    assert thief.heard() == {"held": 64, "error": 0}, "it was first"
    eventually(lambda: "bypasses MPS" in machine.problem(), machine.problem(), 60.0)
    measured("a process past MPS between two servers", machine.problem())
    assert f"process {thief.pid} " in machine.problem()
    thief.close()
    machine.wait_ready()


@pytest.mark.parametrize("clients", [0, 1])
def test_a_frozen_server_is_replaced_with_its_daemon(machine, measured, clients):
    """Also what its clients and its daemon make of it, which no double knows."""
    machine.share("pod", 2048)
    running = busy(machine, clients, mib=1024)
    (server,) = LOCAL.servers(machine.home / mps.PIPE_FOLDER)
    began = time.monotonic()
    server.signal(signal.SIGSTOP)
    machine.wait_not_ready()
    measured(f"server gets SIGSTOP with {clients} busy clients: the manager says", machine.problem())
    machine.wait_ready(2048)
    seconds = time.monotonic() - began
    measured(f"server gets SIGSTOP with {clients} busy clients: ready again after (s)", f"{seconds:.1f}")
    assert seconds < HEALED_SECONDS
    for tenant in running:
        tenant.finish()
        measured("a busy client of a frozen server that is replaced", fate(tenant.heard(60.0)["error"]))
    assert computes(machine)


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs the system's Python, to be another user")
def test_a_tenant_of_another_user(machine, measured):
    """Before driver 580 it waits for all clients of the other user; since then one server serves both."""
    machine.share("pod", 2048)
    assert machine.manager is not None
    first = machine.tenant("busy", 1)
    assert first.heard() == {"ready": True}
    second = machine.tenant("see", user=NOBODY)
    try:
        answer = second.heard(20.0)
    except queue.Empty:
        assert not machine.manager.statuses()[machine.card.uuid].multi_user, "one server serves all"
        first.finish()
        first.heard(30.0)
        began = time.monotonic()
        answer = second.heard(60.0)
        measured("another user's client, after the last client of the first has ended (s)", time.monotonic() - began)
    assert not answer.get("error")


def test_clients_are_on_the_card_with_their_memory_and_the_server_is_known(machine, measured):
    """What the audit lives on: which processes NVML lists under MPS, and how much it says they have."""
    machine.share("pod", 4000)
    tenant = machine.tenant("hold", 2048, mib=4000)
    assert tenant.heard() == {"held": 2048, "error": 0}
    listed = {process.pid: process.memory for process in machine.gpus.processes(machine.card.uuid)}
    (server,) = LOCAL.servers(machine.home / mps.PIPE_FOLDER)
    assert listed[tenant.pid] is not None
    assert 2048 <= listed[tenant.pid] <= 4000
    strangers = [pid for pid in listed if pid != tenant.pid and not LOCAL.is_server(pid)]
    assert not strangers
    measured(
        "NVML on a client that holds 2048 MiB", f"{listed[tenant.pid]} MiB; its server {listed.get(server.pid)} MiB"
    )

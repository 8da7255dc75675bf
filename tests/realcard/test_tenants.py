"""Three tenants with unequal shares of one card: what they get, what a hostile one takes, and whom a fault reaches."""

import contextlib
import queue
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest

from cardwise.core.api import mps
from cardwise.kube import paths
from mps.audit.audit import AuditSettings
from mps.host.processes import LOCAL
from tests.realcard.machine import Machine, Tenant, eventually
from tests.realcard.test_containers import belongs
from tests.realcard.test_mps import OUT_OF_MEMORY, computes, fate

SHARES = {"small": 2048, "medium": 4096, "large": 12_288}  # MiB
SMALL, LARGEST = SHARES["small"], SHARES["large"]
TRIED = 2 * LARGEST  # MiB that a way to more is tried with: more than any limit of these shares
CONTEXT = 640  # MiB that CUDA's own context takes of a limit, at most
AUDIT_SECONDS = 0.5
AUDITED_SECONDS = 8 * AUDIT_SECONDS  # in which three audits have looked


@dataclass(frozen=True, slots=True)
class Way:
    """A way in which a program may try to get more than its share.

    call: of CUDA, as tenant.py names it.
    env: variables that the program sets for itself.
    holds: the MiB that MPS is known to hold it to, or None where that is to be measured.
    """

    call: str = "plain"
    env: Mapping[str, str | None] | None = None
    through: bool = True
    holds: int | None = None


WAYS = {
    "asks for more": Way(holds=SMALL),
    "managed memory": Way(call="managed"),
    "stream-ordered memory": Way(call="async"),
    "virtual memory": Way(call="virtual"),
    "writes a larger limit": Way(env={mps.LIMIT_ENV: f"0={TRIED}M"}, holds=mps.ceiling_of_shares([LARGEST])),
    "removes its limit": Way(env={mps.LIMIT_ENV: None}, holds=mps.ceiling_of_shares([LARGEST])),
    "names a GPU that is not there": Way(env={mps.LIMIT_ENV: f"0={SMALL}M,1={SMALL}M"}),
    "leaves MPS": Way(through=False),
}


@pytest.fixture
def shared(machine: Machine) -> Machine:
    """With a pod of each share, and an audit that looks often."""
    if machine.card.memory < 2 * TRIED:
        pytest.skip(f"the card has {machine.card.memory} MiB only")
    for name, mib in SHARES.items():
        machine.bind(name, mib)
    machine.start(audit=replace(AuditSettings(), interval=AUDIT_SECONDS))
    machine.wait_ready(LARGEST)
    return machine


def test_each_has_its_share_while_all_are_full(shared: Machine, measured: Callable[[str, object], None]) -> None:
    tenants = {name: shared.tenant("take", "plain", TRIED, mib=mib) for name, mib in SHARES.items()}
    for name, tenant in tenants.items():
        answer = tenant.heard(60.0)
        assert answer["error"] == OUT_OF_MEMORY
        assert SHARES[name] - CONTEXT - 16 <= answer["allocated"] <= SHARES[name]
        measured(f"share of {SHARES[name]} MiB, all three full", f"{answer['allocated']} MiB allocated")


@pytest.mark.parametrize("name", WAYS)
def test_a_tenant_that_tries_to_take_more(
    shared: Machine,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    measured: Callable[[str, object], None],
) -> None:
    way = WAYS[name]
    neighbour = shared.tenant("busy", 1, mib=SHARES["medium"])
    assert neighbour.heard() == {"ready": True}
    greedy = shared.tenant("take", way.call, TRIED, mib=SMALL, through=way.through, env=way.env)
    belongs(monkeypatch, {greedy.pid: "uid-small", neighbour.pid: "uid-medium"})
    answer = greedy.heard(60.0)
    if way.holds is not None:
        assert answer["allocated"] <= way.holds
    reasons = audited(shared, expected=answer["allocated"] > SMALL + CONTEXT)
    neighbour.finish()
    error = neighbour.heard(30.0)["error"]
    amount = f"{answer['allocated']} MiB of {TRIED} tried" + ("" if answer["error"] else ", and nothing refused")
    measured(f"a share of {SMALL} MiB: {name}", f"{amount}; audit: {reasons}; its neighbour {fate(error)}")
    assert error == 0


def audited(machine: Machine, *, expected: bool) -> str:
    """The reasons of the audit's events of the pod `small`."""

    def reasons() -> list[str]:
        events = machine.api.all(paths.events("default"))
        return sorted({event["reason"] for event in events if event["involvedObject"]["name"] == "small"})

    if expected:
        with contextlib.suppress(AssertionError):
            eventually(reasons, timeout=AUDITED_SECONDS)
    return ", ".join(reasons()) or "nothing"


def test_two_processes_take_the_share_twice(shared: Machine, measured: Callable[[str, object], None]) -> None:
    processes = [shared.tenant("take", "plain", TRIED, mib=SMALL) for _ in range(2)]
    allocated = sum(process.heard(60.0)["allocated"] for process in processes)
    measured(f"two processes of a share of {SMALL} MiB", f"{allocated} MiB allocated")


def test_a_tenant_that_kills_the_daemon(shared: Machine, measured: Callable[[str, object], None]) -> None:
    """By a line of 4,095 bytes on the socket that each container has (drivers 580 and 595)."""
    neighbour = shared.tenant("busy", 1, mib=SMALL)
    assert neighbour.heard() == {"ready": True}
    (daemon,) = LOCAL.daemons(shared.home / mps.PIPE_FOLDER)
    began = time.monotonic()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as attacker:
        attacker.connect(str(shared.home / mps.CLIENTS_FOLDER / mps.CONTROL_SOCKET))
        attacker.send(b"x" * 4095 + b"\n")
    try:
        eventually(lambda: not daemon.is_alive(), timeout=3.0)
    except AssertionError:
        measured("a line of 4,095 bytes to the daemon", "it lives")
        return
    shared.wait_not_ready()
    shared.wait_ready(LARGEST)
    measured("a line of 4,095 bytes kills the daemon: ready again after (s)", f"{time.monotonic() - began:.1f}")
    neighbour.finish()
    measured("a neighbour of a daemon that a tenant killed", fate(neighbour.heard(60.0)["error"]))


def test_a_fault_of_one_reaches_the_two_others(shared: Machine, measured: Callable[[str, object], None]) -> None:
    neighbours = {name: shared.tenant("busy", 1, mib=SHARES[name]) for name in ("medium", "large")}
    for neighbour in neighbours.values():
        assert neighbour.heard() == {"ready": True}
    assert shared.tenant("crash", mib=SMALL).heard()["error"] != 0
    began = time.monotonic()
    for name, neighbour in neighbours.items():
        measured(f"a fault of the share of {SMALL} MiB: {SHARES[name]} MiB", fate(fault(neighbour)))
    shared.wait_ready(LARGEST)
    eventually(lambda: computes(shared), "no new tenant computes", 60.0)
    measured("after a fault, until a new tenant computes (s)", f"{time.monotonic() - began:.1f}")


def fault(neighbour: Tenant) -> int:
    """Its error; 0 where it is still at work after five seconds, and then ends."""
    with contextlib.suppress(queue.Empty):
        return int(neighbour.heard(5.0)["error"])
    neighbour.finish()
    return int(neighbour.heard(30.0)["error"])

"""A card between two servers: who comes upon it past MPS keeps it closed, is named, and has to go."""

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cardwise.core.api.mps import DaemonScope, MpsState
from cardwise.core.values.quantity import MiB
from cardwise.gpus.protocol import GpuCard
from cardwise.kube.events import ObjectRef
from mps.audit.audit import AuditSettings
from mps.daemon.foreignprocesses import FORMER_CLIENT_SECONDS, ForeignProcesses
from mps.daemon.units import DaemonUnit
from mps.host.processes import SERVER_PROGRAM
from tests.fakes.clock import FakeClock
from tests.mps.mpsnode import uuid_of
from tests.theory import theory_of

AUDIT = AuditSettings(interval=10.0, passes=3, tolerance=MiB(512), evict_after=300.0)


def test_the_example_of_the_docstring():
    theory, clock, on_card = theory_of("mps.daemon.foreignprocesses"), FakeClock(), [41, 42]
    card = GpuCard(index=0, uuid=uuid_of(0), model="m", memory=MiB(1000), devices=())
    use = SimpleNamespace(processes=lambda _uuid: [SimpleNamespace(pid=pid) for pid in on_card])
    host = SimpleNamespace(activity=lambda pid: pid if pid in on_card else None)
    unit = DaemonUnit(name=card.uuid, home=Path("/unused"), scope=DaemonScope.CARD, cards=(card,))
    foreign = ForeignProcesses(unit, use, host, str, clock)

    died, next_start, last_look = 100, 105, 710
    assert f"a server with clients {on_card[0]} and {on_card[1]} dies at {died} s" in theory
    foreign.set_clients(on_card)
    on_card.remove(41)
    assert f"At {next_start} s process {on_card[0]} still is on the card: it is a former client" in theory
    clock.advance(next_start - died)
    assert foreign.start_block_result() is None, "a new server may start"
    foreign.mark_start_tried()
    assert foreign.start_block_result() is not None
    assert not foreign.processes
    clock.advance(last_look - next_start)
    assert foreign.start_block_result() is not None
    assert f"At {last_look} s the process is still there, and no server got the card" in theory
    assert foreign.processes == {(card.uuid, on_card[0])}
    assert last_look - died >= FORMER_CLIENT_SECONDS


def die(node, index: int = 0) -> None:
    """The daemon and its server end at once."""
    for process in [*node.servers(index), node.daemon(index)]:
        process.kill()


def remove_process(node, process, index: int = 0) -> None:
    process.kill()
    node.cards[index]["processes"] = [
        process_entry for process_entry in node.cards[index]["processes"] if process_entry["pid"] != process.pid
    ]
    node.write_cards()


@pytest.fixture
def ready(node):
    """`thief` and `neighbour` have shares of the first card."""
    node.bind("thief", 0, 1000)
    node.bind("neighbour", 0, 1000)
    node.start(audit=AUDIT)
    node.wait_ready()
    return node


def test_no_server_starts_beside_a_process_that_came_past_mps(ready):
    die(ready)
    thief = ready.use(0, 300, "thief")
    ready.pass_time(120.0)
    status = ready.status()
    assert status.state is MpsState.DOWN
    assert status.reason == (
        f"process {thief.pid} (python) of pod default/thief on {uuid_of(0)} bypasses MPS: no server can start "
        "before it ends"
    )
    assert ready.mode() == "ExclusiveProcess"
    assert not ready.servers()
    remove_process(ready, thief)
    ready.wait_ready()


def test_nor_is_a_card_ready_whose_server_it_has_got_in_before(ready):
    (server,) = ready.servers()
    thief = ready.use(0, 300, "thief")
    server.kill()  # the daemon lives
    ready.until(lambda: "bypasses MPS" in ready.status().reason)
    ready.pass_time(60.0)
    assert ready.status().state is not MpsState.READY
    assert not ready.servers()
    remove_process(ready, thief)
    ready.wait_ready()


def test_its_pod_is_told_and_goes_by_the_audits_rules(ready):
    die(ready)
    ready.use(0, 300, "thief")
    ready.until(lambda: ready.status().state is MpsState.DOWN)
    evicted = []
    ready.api.after_request(lambda call: evicted.append(call.path), "create", "*/eviction", times=9)
    for _ in range(3):
        ready.pass_time(10.0)
        ready.manager._audit.audit_once()
    ((about, _, text, _),) = ready.events.with_reason("MPSBypassed")
    assert about == ObjectRef.pod("default", "thief", "uid-thief")
    assert text.startswith(f"container main uses card {uuid_of(0)} without MPS")
    assert not evicted
    ready.pass_time(300.0)
    ready.manager._audit.audit_once()
    assert evicted == ["/api/v1/namespaces/default/pods/thief/eviction"]


def test_a_process_of_no_pod_is_named_and_keeps_the_card_closed(ready):
    die(ready)
    other = ready.use(0, 300)
    ready.pass_time(60.0)
    assert ready.status().reason.startswith(f"process {other.pid} (python) on ")
    assert ready.status().state is MpsState.DOWN


def test_who_calls_itself_a_server_is_none(ready):
    die(ready)
    ready.use(0, 300, "thief", name=SERVER_PROGRAM)
    ready.pass_time(60.0)
    assert ready.status().state is MpsState.DOWN


def test_clients_of_the_former_server_are_no_strangers_to_the_next(ready):
    ready.add_client(0, "neighbour")
    ready.pass_time(30.0)  # it is known
    die(ready)
    ready.until(lambda: ready.status().state is not MpsState.READY)
    ready.wait_ready()


def test_nor_those_of_a_server_that_has_outlived_its_daemon(ready):
    ready.daemon().kill()
    ready.add_client(0, "neighbour")
    ready.until(lambda: ready.status().state is not MpsState.READY)
    ready.wait_ready()


def test_a_former_client_keeps_the_card_closed_where_the_next_server_does_not_come_up(ready):
    client = ready.add_client(0, "neighbour")
    ready.pass_time(30.0)
    ready.touch_double_file("server-starting")
    die(ready)
    ready.until(lambda: "was a client of an MPS server that ended" in ready.status().reason)
    assert f"process {client.pid} " in ready.status().reason
    assert not ready.servers()


def test_nobody_ends_a_former_client_that_may_be_on_its_way_out(ready):
    """Why the next server did not come up, nobody knows: it may be for anything else."""
    ready.add_client(0, "neighbour")
    ready.pass_time(30.0)
    evicted = []
    ready.api.after_request(lambda call: evicted.append(call.path), "create", "*/eviction", times=9)
    ready.touch_double_file("server-starting")
    began = ready.clock.now()
    die(ready)
    ready.until(lambda: "was a client of an MPS server that ended" in ready.status().reason)
    while ready.clock.now() < began + FORMER_CLIENT_SECONDS - 60.0:
        ready.pass_time(10.0)
        ready.manager._audit.audit_once()
    assert not ready.events.with_reason("MPSBypassed")
    # But who was a client once may be past MPS now: it has an end.
    ready.until(lambda: "bypasses MPS" in ready.status().reason)
    assert not evicted
    while ready.clock.now() < began + FORMER_CLIENT_SECONDS + AUDIT.evict_after + 120.0:
        ready.pass_time(10.0)
        ready.manager._audit.audit_once()
    assert len(ready.events.with_reason("MPSBypassed")) == 1
    assert evicted == ["/api/v1/namespaces/default/pods/neighbour/eviction"]


def test_who_came_past_mps_is_found_out_beside_former_clients(ready):
    ready.add_client(0, "neighbour")
    ready.pass_time(30.0)
    ready.touch_double_file("server-starting")
    die(ready)
    ready.until(lambda: "was a client of an MPS server that ended" in ready.status().reason)
    thief = ready.use(0, 300, "thief")
    ready.until(lambda: "bypasses MPS" in ready.status().reason)
    assert ready.status().reason.startswith(f"process {thief.pid} (python) of pod default/thief on")
    assert {pid for daemon in ready.manager.daemons() for _, pid in daemon.foreign_processes} == {thief.pid}


def test_where_pods_do_without_mps_they_may_be_on_the_card(node):
    node.bind("without", 0, 1000, without_mps=True)
    node.start()
    node.until(lambda: node.status().state is MpsState.OFF)
    node.use(0, 300, "without")
    node.pass_time(60.0)
    assert node.status().state is MpsState.OFF


def test_where_cards_are_not_closed_everybody_may_be_on_them(node):
    node.settings = replace(node.settings, exclusive=False)
    node.use(0, 300)
    node.start()
    node.wait_ready()


def test_a_server_that_is_stopped_is_no_stranger(ready):
    (server,) = ready.servers()
    ready.set_use(0, server.pid, 100)
    server.signal(signal.SIGSTOP)
    ready.until(lambda: ready.status().state is not MpsState.READY)
    ready.until(lambda: ready.servers() != [server])
    ready.wait_ready()

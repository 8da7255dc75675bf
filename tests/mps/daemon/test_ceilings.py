"""The settings that a manager keeps in its daemons, first of all the ceiling of a client's memory."""

from pathlib import Path

from cardwise.core.api import mps
from cardwise.core.api.mps import DaemonScope
from cardwise.core.values.quantity import MiB
from cardwise.gpus.protocol import ComputeMode, GpuCard
from mps.daemon.ceilings import Ceilings
from mps.daemon.units import DaemonUnit
from mps.host.control import CommandRefused, Control
from tests.mps.double import daemon as double
from tests.mps.mpsnode import P100, uuid_of
from tests.theory import theory_of


class OneServer:
    """The front end of a daemon with one card and one server, which keeps its limit while `refuses`."""

    def __init__(self) -> None:
        self.default = self.limit = "512M"
        self.refuses = False

    def send(self, command: str, timeout: float) -> str:
        del timeout
        match command.split():
            case ["get_server_list"]:
                return "77"
            case ["get_default_device_pinned_mem_limit", _]:
                return self.default
            case ["get_device_pinned_mem_limit", "77", _]:
                return self.limit
            case ["set_default_device_pinned_mem_limit", _, limit]:
                self.default = limit
            case ["set_device_pinned_mem_limit", "77", _, limit]:
                if self.refuses:
                    raise CommandRefused("Failed to set the limit")
                self.limit = limit
        return ""


def test_the_example_of_the_docstring():
    theory, front = theory_of("mps.daemon.ceilings"), OneServer()
    card = GpuCard(index=0, uuid=uuid_of(0), model="m", memory=MiB(4 * P100), devices=())
    unit = DaemonUnit(name=card.uuid, home=Path("/unused"), scope=DaemonScope.CARD, cards=(card,))
    ceilings = Ceilings(unit, Control(front, timeout=1.0))
    shares, added = (MiB(4096), MiB(8192)), MiB(12288)

    ceilings.desired = {card.uuid: mps.ceiling_of_shares(shares)}
    ceilings.apply_ceilings()
    confirmed = ceilings.confirmed[card.uuid]
    assert f"the shares on a card are {shares[0]} and {shares[1]} MiB, so the ceiling is {confirmed} MiB" in theory
    ceilings.desired = {card.uuid: mps.ceiling_of_shares([*shares, added])}
    front.refuses = True
    ceilings.apply_ceilings()
    assert f"A share of {added} MiB is added: the daemon accepts {added}, a running server refuses" in theory
    assert front.default == f"{added}M"
    assert f"`confirmed` stays {ceilings.confirmed[card.uuid]} MiB" in theory
    assert ceilings.is_outdated
    front.refuses = False
    ceilings.apply_ceilings()
    assert ceilings.confirmed == {card.uuid: added}, "the next pass tries again"
    for sizes, expected in (([], 512), ([100], 512), ([513], 513), ([8138], 8192)):
        assert mps.ceiling_of_shares([MiB(mib) for mib in sizes]) == expected
    assert "(at least 512 MiB, and in whole GiB from 1 GiB on)" in theory


def test_the_ceiling_follows_the_largest_share_before_a_container_can_start(pair):
    pair.start()
    pair.wait_ready()
    assert "allows 512 MiB, and 8138 MiB are needed" in pair.problem(memory_limit=MiB(8138))
    pair.bind("small", 0, 300)
    pair.bind("large", 0, 8138)
    pair.wait_ready(memory_limit=MiB(8138))
    (server,) = pair.servers()
    assert pair.send_command(f"get_device_pinned_mem_limit {server.pid} 0") == "8G", (
        "the running server takes it at once"
    )
    assert pair.send_command("get_default_device_pinned_mem_limit 0") == "8G", "and so would the next"
    pair.end("large")
    pair.until(lambda: pair.send_command("get_default_device_pinned_mem_limit 0") == "512M")
    assert "allows 512 MiB" in pair.problem(memory_limit=MiB(8138))
    assert pair.send_command("get_default_device_pinned_mem_limit 0", 1) == "512M", "the other card is not meant"


def test_a_ceiling_that_a_server_does_not_take_is_never_claimed(node):
    node.start()
    node.wait_ready()
    kept = node.touch_double_file("server-limit-kept")
    node.bind("large", 0, 8138)
    node.until(lambda: node.send_command("get_default_device_pinned_mem_limit 0") == "8G")
    node.pass_time(10.0)
    assert "allows 512 MiB" in node.problem(memory_limit=MiB(8138))
    kept.unlink()
    node.wait_ready(memory_limit=MiB(8138))


def test_a_server_that_starts_while_the_ceiling_is_lowered_has_the_new_one(node, monkeypatch):
    """Before the daemon is told, so with the old one: a client may make it start a server at any time."""
    node.bind("large", 0, 8138)
    node.start()
    node.wait_ready(memory_limit=MiB(8138))
    obey, started = double.Daemon.obey, []

    def obey_and_record(daemon, line, uid):
        if line.startswith("set_default_device_pinned_mem_limit") and not started:
            daemon.server.process.kill()
            obey(daemon, "start_server -uid 0", 0)
            started.append(daemon.server)
        return obey(daemon, line, uid)

    monkeypatch.setattr(double.Daemon, "obey", obey_and_record)
    node.end("large")
    node.until(lambda: node.status().ceilings == {uuid_of(0): 512})
    assert [server.limits["0"] for server in started] == [512 * double.MIB]


def test_settings_that_somebody_changed_are_set_again(node):
    node.start()
    node.wait_ready()
    node.send_command("set_default_active_thread_percentage 10")
    node.until(lambda: node.send_command("get_default_active_thread_percentage") == "100.0")
    node.send_command("set_default_device_pinned_mem_limit 0 0G")
    node.until(lambda: node.send_command("get_default_device_pinned_mem_limit 0") == "512M")
    node.gpus.set_compute_mode(uuid_of(0), ComputeMode.DEFAULT)
    node.until(lambda: node.mode() == "ExclusiveProcess")
    node.wait_ready()


def test_a_manager_that_does_not_know_the_pods_keeps_the_ceilings_that_there_are(node):
    node.bind("pod", 0, 8138)
    node.start()
    node.wait_ready(0, memory_limit=MiB(8138))
    node.crash()
    node.pods.synced = False
    node.start()
    node.wait_ready(0, memory_limit=MiB(8138))
    assert node.send_command("get_default_device_pinned_mem_limit 0") == "8G"
    node.daemon().kill()
    node.until(node.problem)
    node.wait_ready(0, memory_limit=MiB(P100))
    node.pods.synced = True
    node.until(lambda: node.send_command("get_default_device_pinned_mem_limit 0") == "8G", "once the pods are known")


def test_a_new_daemon_is_not_reached_by_clients_before_it_has_its_ceiling(node, monkeypatch):
    """Until then a process without a limit of its own would get the whole card."""
    link, setting = node.home() / mps.CLIENTS_FOLDER / mps.CONTROL_SOCKET, "set_default_device_pinned_mem_limit 0 8192M"
    commands = []  # and whether a client could have come before
    obey = double.Daemon.obey
    monkeypatch.setattr(double.Daemon, "obey", lambda *args: commands.append((args[1], link.exists())) or obey(*args))
    node.bind("pod", 0, 8138)
    node.start()
    for _ in range(2):
        node.until(link.exists)
        assert node.send_command("get_default_device_pinned_mem_limit 0") == "8G"
        assert [reached for command, reached in commands if command == setting] == [False], commands
        node.wait_ready(memory_limit=MiB(8138))
        node.daemon().kill()
        node.until(lambda: not link.exists())
        commands.clear()

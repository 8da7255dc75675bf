"""The settings that a manager keeps in its daemons, first of all the ceiling of a client's memory."""

from cardwise.core.api import mps
from cardwise.core.values.quantity import MiB
from cardwise.gpus.protocol import ComputeMode
from tests.mps.double import daemon as double
from tests.mps.worlds import P100, uuid_of


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
    link, setting = node.home() / mps.CLIENTS / mps.CONTROL, "set_default_device_pinned_mem_limit 0 8192M"
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

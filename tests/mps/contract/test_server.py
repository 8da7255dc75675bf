"""The server of a control daemon: its start and its end, and what it does for clients where there is one."""

import contextlib
import signal

import pytest

from cardwise.core.values.quantity import MiB
from mps.host.control import Client, CommandRefused, NoDaemon, ServerStatus, UnknownCommand
from tests.mps.contract.programs import SECONDS, eventually


class TestServer:
    def test_it_is_started_in_silence_and_stays(self, running):
        server = running.server()
        assert [process.pid for process in running.host.servers(running.pipe)] == [server]
        assert running.control.clients(server) == []
        running.front.send("start_server -uid 1000", SECONDS)
        assert running.control.servers() == [server], "one user at a time: the next has to wait"

    def test_another_users_waits_until_it_has_ended(self, running):
        server = running.server()
        running.front.send("start_server -uid 1000", SECONDS)
        assert running.control.servers() == [server]
        assert "for user 1000" not in running.log.read_text()
        (process,) = running.host.servers(running.pipe)
        process.signal(signal.SIGKILL)
        eventually(lambda: running.control.servers() != [server] and "for user 1000" in running.log.read_text())

    def test_one_that_fails_is_only_not_there(self, running):
        (running.folder / "log" / "server-fails").touch()
        running.control.start_server()
        eventually(lambda: running.control.servers() == [])

    def test_its_status_is_asked_where_the_driver_knows_the_question(self, running):
        server = running.server()
        if running.driver < 550:
            with pytest.raises(UnknownCommand):
                running.control.status(server)
        else:
            assert running.control.status(server) is ServerStatus.INITIALIZING
            with pytest.raises(CommandRefused, match="not found"):
                running.control.status(4711)

    def test_it_outlives_a_killed_daemon_and_the_next_does_not_know_it(self, every):
        server = every.server()
        assert [process.pid for process in every.host.servers(every.pipe)] == [server]
        every.kill()
        every.start()
        assert every.control.servers() == []
        assert [process.pid for process in every.host.servers(every.pipe)] == [server]

    def test_a_client_that_is_not_there_is_not_detached(self, running):
        with pytest.raises(CommandRefused, match="not found"):
            running.control.terminate(Client(4711, 4712))


class TestDoubleOnly:
    """What needs a server of NVIDIA's, and so a card: as the manuals say it."""

    @pytest.fixture
    def served(self, running):
        if running.real:
            pytest.skip("needs NVIDIA's server, which needs a card")
        server = running.server()
        if running.driver >= 550:
            eventually(lambda: running.control.status(server) is ServerStatus.ACTIVE)
        return running, server

    def client(self, world) -> int:
        client = world.host.add("python")
        (world.folder / "log" / "clients").write_text(f"{client.pid}\n")
        return client.pid

    def test_defaults_are_for_the_next_server(self, served):
        world, server = served
        world.control.set_ceiling(0, MiB(2048))
        assert world.control.server_ceiling(server, 0) is None
        world.control.set_server_ceiling(server, 0, MiB(4096))
        assert (world.control.server_ceiling(server, 0), world.control.ceiling(0)) == (4096, 2048)

    def test_a_fault_stays_until_the_last_client_is_gone(self, served):
        world, server = served
        if world.driver < 550:
            pytest.skip("535 tells no status")
        client = self.client(world)
        (world.folder / "log" / "fault").touch()
        assert world.control.status(server) is ServerStatus.FAULT
        assert world.control.clients(server) == [Client(server, client)]
        world.control.terminate(Client(server, client))
        assert world.control.status(server) is ServerStatus.ACTIVE

    def test_quit_waits_for_clients_only_as_long_as_it_is_told(self, served):
        world, _ = served
        self.client(world)
        began = world.clock.now()
        with contextlib.suppress(NoDaemon):
            world.control.quit(7, SECONDS)
        world.ended()
        assert 7.0 <= world.clock.now() - began < 8.0

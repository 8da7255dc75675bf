"""Registration with a kubelet that listens: when it is made again, and that no socket is left behind."""

from collections.abc import Iterator

import pytest

from deviceplugin.grants.access import Access
from deviceplugin.plugin import slots
from deviceplugin.plugin.registration import Registration
from deviceplugin.plugin.server import PluginServer
from tests.deviceplugin.fakenode import PATIENCE, ServedKubelet
from tests.fakes.clock import FakeClock

SLOTS = slots.make_slot_ids(4)


class Plugin:
    """A registration, whose thread is not started: `check_after` is its turn."""

    def __init__(self, kubelet: ServedKubelet) -> None:
        self.kubelet = kubelet
        self.clock = FakeClock()
        self.access: Access | None = Access.CDI
        self.allocatable = ""
        self.registration = Registration(kubelet.plugins, self._serve, lambda: self.allocatable, self.clock)

    def _serve(self, socket) -> PluginServer | None:
        if self.access is None:
            return None
        return PluginServer(socket, slot_ids=SLOTS, access=self.access, prestart=lambda *_: None)

    def check_after(self, seconds: float = 0.0) -> int:
        """How often it has been registered after a look at the end of so many seconds."""
        self.clock.advance(seconds)
        self.registration._loop.run_once()
        return len(self.kubelet.registered)

    def stream_ends(self) -> None:
        """As the plugin's server sees it."""
        (ended,) = self.registration._server._streams
        self.kubelet.disconnect()
        assert ended.wait(PATIENCE)

    def sockets(self) -> list[str]:
        return [path.name for path in self.kubelet.plugins.glob("cardwise-*.sock")]


@pytest.fixture
def plugin(folder) -> Iterator[Plugin]:
    kubelet = ServedKubelet(folder)
    plugin = Plugin(kubelet)
    yield plugin
    plugin.registration.stop()
    kubelet.stop()


def test_it_is_made_once_while_the_kubelet_listens(plugin):
    assert "not registered" in plugin.registration.problem
    assert plugin.check_after() == 1
    assert plugin.registration.problem is None
    assert plugin.kubelet.devices == list(SLOTS)
    assert plugin.check_after(3600) == 1


def test_without_a_kubelet_or_a_word_of_the_runtime_it_waits(plugin):
    plugin.access = None
    assert plugin.check_after() == 0
    plugin.access = Access.CDI
    plugin.kubelet.stop()
    assert plugin.check_after() == 0
    plugin.kubelet.start()
    assert plugin.check_after() == 1


def test_a_kubelet_that_restarts_gets_another_one(plugin):
    plugin.check_after()
    plugin.kubelet.restart()
    assert "is gone or has restarted" in plugin.registration.problem
    assert plugin.check_after() == 2
    first, second = plugin.kubelet.registered
    assert first.endpoint != second.endpoint
    assert plugin.sockets() == [second.endpoint]


def test_a_lost_stream_is_given_time_and_then_registered_again(plugin):
    plugin.check_after()
    plugin.stream_ends()
    assert plugin.registration.problem == "the kubelet has not connected back"
    assert plugin.check_after() == 1
    assert plugin.check_after(2.9) == 1
    assert plugin.check_after(0.1) == 2
    assert plugin.registration.problem is None


def test_a_socket_that_somebody_removes_is_made_again(plugin):
    plugin.check_after()
    for path in plugin.kubelet.plugins.glob("cardwise-*.sock"):
        path.unlink()
    assert plugin.check_after() == 2


def test_a_node_that_goes_on_showing_no_slots_is_registered_again(plugin):
    plugin.check_after()
    plugin.allocatable = "0"
    assert plugin.check_after() == 1
    assert plugin.check_after(29) == 1
    plugin.allocatable = "4"
    assert plugin.check_after(1) == 1
    plugin.allocatable = "0"
    assert plugin.check_after(29) == 1, "the time begins anew"
    assert plugin.check_after(30) == 2


def test_it_leaves_no_socket_and_removes_those_of_a_killed_one(plugin):
    find_stale_specs = plugin.kubelet.plugins / "cardwise-share-1-1-1.sock"
    find_stale_specs.touch()
    plugin.check_after()
    assert find_stale_specs.name not in plugin.sockets()
    plugin.registration.stop()
    assert plugin.sockets() == []

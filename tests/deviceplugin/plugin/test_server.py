"""The plugin's gRPC service on its socket: what it answers to good and bad calls, whatever is behind it."""

from collections.abc import Iterator, Sequence

import grpc
import pytest

from deviceplugin.api import deviceplugin_v1beta1_pb2 as wire
from deviceplugin.grants.access import Access
from deviceplugin.grants.granting import IsActive, StartRefused
from deviceplugin.plugin import slots
from deviceplugin.plugin.server import PluginServer
from tests.deviceplugin.conftest import refusal
from tests.deviceplugin.fakenode import PATIENCE
from tests.fakes import grpcs


class Served:
    """A server, and a channel to it. `outcome` is raised by PreStartContainer."""

    def __init__(self, folder) -> None:
        self.started: list[Sequence[str]] = []
        self.outcome: Exception | None = None
        self.server = PluginServer(
            folder / "plugin.sock", slot_ids=slots.make_slot_ids(4), access=Access.CDI, prestart=self._prestart
        )
        self.server.start()
        self.channel = grpc.insecure_channel(f"unix:{self.server.socket}")
        self.plugin = grpcs.stub(self.channel, wire.DESCRIPTOR.services_by_name["DevicePlugin"])

    def _prestart(self, named: Sequence[str], active: IsActive) -> None:
        self.started.append(named)
        self.was_active = active()
        if self.outcome is not None:
            raise self.outcome

    def start(self, *named: str) -> None:
        self.plugin.PreStartContainer(wire.PreStartContainerRequest(devices_ids=named), timeout=PATIENCE)


@pytest.fixture
def served(folder) -> Iterator[Served]:
    served = Served(folder)
    yield served
    served.channel.close()
    served.server.stop()


@pytest.mark.parametrize("verb", ["Allocate", "PreStartContainer"])
@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"\x0a\x7f", b"\x0a\x06\x0a\x04none"], ids=["bytes", "cut", "slot"])
def test_a_malformed_request_gets_a_clean_status(served, verb, body, caplog):
    call = served.channel.unary_unary(f"/v1beta1.DevicePlugin/{verb}")
    code, message = refusal(lambda: call(body, timeout=PATIENCE))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message
    assert "Traceback" not in caplog.text
    assert served.started == []


def test_an_empty_prestart_is_refused(served):
    assert refusal(served.start)[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_how_a_start_ends_is_told(served):
    served.start("s001", "s002")
    assert served.started == [("s001", "s002")]
    assert served.was_active
    served.outcome = StartRefused("card 0 is unhealthy")
    assert refusal(lambda: served.start("s001")) == (grpc.StatusCode.FAILED_PRECONDITION, "card 0 is unhealthy")
    served.outcome = StartRefused(f"pod p: {'é' * 5000}; create it again")
    _, message = refusal(lambda: served.start("s001"))
    assert len(message.encode()) <= 1024  # what an event takes
    assert message.endswith("; create it again")
    served.outcome = KeyError("unforeseen")
    code, message = refusal(lambda: served.start("s001"))
    assert code is grpc.StatusCode.INTERNAL
    assert "KeyError('unforeseen')" in message


def test_a_stream_lasts_until_the_server_ends(served):
    stream = served.plugin.ListAndWatch(wire.Empty())
    assert [device.ID for device in next(stream).devices] == list(slots.make_slot_ids(4))
    assert served.server.streams == 1
    served.server.stop(grace=PATIENCE)
    assert list(stream) == []
    assert served.server.streams == 0
    assert not served.server.socket.exists()

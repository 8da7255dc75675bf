"""The DRA plugin on its two sockets, called as the kubelet calls it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest

from deviceplugin.api import dra_v1_pb2 as dra
from deviceplugin.api import pluginregistration_v1_pb2 as registration
from deviceplugin.grants.claims import ClaimName, ContainerDevices
from deviceplugin.grants.granting import IsActive, StartRefused
from deviceplugin.plugin.claimserver import ClaimRegistration
from tests.deviceplugin.conftest import refusal
from tests.deviceplugin.fakenode import PATIENCE
from tests.fakes import grpcs
from tests.fakes.clock import FakeClock

CONTAINERS = [
    ContainerDevices("main", "n1", ["gpu-0", "gpu-1"], "cardwise.dev/share=u1-main"),
    ContainerDevices("side", "n1", ["gpu-0"], "cardwise.dev/share=u1-side"),
]


class Node:
    """A registration whose thread is not started, and the kubelet's calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prepared: list[ClaimName] = []
        self.released: list[ClaimName] = []
        self.outcome: Exception | None = None
        self.obstacle: str | None = None
        self.plugin = ClaimRegistration(folder, self._prepare, self.released.append, lambda: self.obstacle, FakeClock())

    def _prepare(self, claim: ClaimName, is_active: IsActive) -> Sequence[ContainerDevices]:
        assert is_active()
        self.prepared.append(claim)
        if self.outcome is not None and claim.uid == "u1":
            raise self.outcome
        return CONTAINERS

    def check(self) -> None:
        self.plugin._loop.run_once()

    @property
    def socket(self) -> Path:
        return self.folder / "plugins_registry" / "cardwise.dev-reg.sock"

    def register(self, error: str = "") -> registration.PluginInfo:
        """As the kubelet, when it finds the socket or starts."""
        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            stub = grpcs.stub(channel, registration.DESCRIPTOR.services_by_name["Registration"])
            info = stub.GetInfo(registration.InfoRequest(), timeout=PATIENCE)
            status = registration.RegistrationStatus(plugin_registered=not error, error=error)
            stub.NotifyRegistrationStatus(status, timeout=PATIENCE)
            return info

    def call(self, verb: str, *uids: str):
        request_type = getattr(dra, f"Node{verb}ResourcesRequest")
        claims = [dra.Claim(namespace="default", name=f"cardwise-{uid}", uid=uid) for uid in uids]
        with grpc.insecure_channel(f"unix:{self.register().endpoint}") as channel:
            stub = grpcs.stub(channel, dra.DESCRIPTOR.services_by_name["DRAPlugin"])
            return getattr(stub, f"Node{verb}Resources")(request_type(claims=claims), timeout=PATIENCE).claims


@pytest.fixture
def node(folder: Path) -> Iterator[Node]:
    node = Node(folder)
    node.check()
    yield node
    node.plugin.stop()


def test_the_kubelet_finds_it_and_says_whether_it_takes_it(node):
    assert "not registered" in node.plugin.problem
    info = node.register()
    assert (info.type, info.name, list(info.supported_versions)) == ("DRAPlugin", "cardwise.dev", ["v1.DRAPlugin"])
    assert node.plugin.problem is None
    node.register("no supported version")
    assert node.plugin.problem == "the kubelet rejected the DRA plugin cardwise.dev: no supported version"


def test_devices_go_to_the_request_of_their_container(node):
    devices = node.call("Prepare", "u1")["u1"].devices
    assert [(list(device.request_names), device.pool_name, device.device_name) for device in devices] == [
        (["main"], "n1", "gpu-0"),
        (["main"], "n1", "gpu-1"),
        (["side"], "n1", "gpu-0"),
    ]
    cdi_devices = [list(device.cdi_device_ids) for device in devices]
    assert cdi_devices == [["cardwise.dev/share=u1-main"], [], ["cardwise.dev/share=u1-side"]]


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (StartRefused("card 0 is unhealthy"), "card 0 is unhealthy"),
        (KeyError("unforeseen"), "Cardwise's device plugin failed: KeyError('unforeseen'); see its log"),
    ],
)
def test_a_claim_that_fails_is_told_and_does_not_stop_the_others(node, outcome, error):
    node.outcome = outcome
    answers = node.call("Prepare", "u1", "u2")
    assert answers["u1"].error == error
    assert not answers["u1"].devices
    assert (answers["u2"].error, len(answers["u2"].devices)) == ("", 3)


def test_each_released_claim_is_answered(node):
    answers = node.call("Unprepare", "u1", "u2")
    assert {uid: answer.error for uid, answer in answers.items()} == {"u1": "", "u2": ""}
    assert [claim.uid for claim in node.released] == ["u1", "u2"]


def test_a_malformed_request_gets_a_clean_status(node):
    with grpc.insecure_channel(f"unix:{node.register().endpoint}") as channel:
        call = channel.unary_unary("/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources")
        assert refusal(lambda: call(b"\xff\xff\xff", timeout=PATIENCE))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert node.prepared == []


def test_a_socket_that_somebody_removes_is_made_again(node):
    node.register()
    node.socket.unlink()
    node.check()
    assert "were removed" in node.plugin.problem
    assert node.call("Prepare", "u1")["u1"].error == ""
    assert node.plugin.problem is None


def test_it_replaces_the_sockets_of_a_killed_plugin_and_leaves_none(folder):
    (folder / "plugins_registry").mkdir()
    (folder / "plugins_registry" / "cardwise.dev-reg.sock").touch()
    node = Node(folder)
    node.check()
    assert node.call("Prepare", "u1")["u1"].error == ""
    node.plugin.stop()
    assert not list(folder.rglob("*.sock"))


def test_while_no_claim_can_be_prepared_the_kubelet_does_not_find_it(folder):
    node = Node(folder)
    node.obstacle = "no CDI"
    node.check()
    assert node.plugin.problem == "no CDI"
    assert not node.socket.exists()
    node.obstacle = None
    node.check()
    node.register()
    assert node.plugin.problem is None
    node.plugin.stop()

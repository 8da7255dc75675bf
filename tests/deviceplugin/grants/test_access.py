"""How containers get at their cards: by CDI or by the environment, and what a card without a device node does."""

import grpc
import pytest

from cardwise.core.api import names
from deviceplugin.grants.access import Access
from tests.deviceplugin.conftest import P100, Rig, refusal


def is_open(rig: Rig) -> None:
    """A container gets no device, and the cluster is told so."""
    slot = rig.run(rig.bind("a", [(1, 8138)]))
    assert not rig.kubelet.allocation.container_responses[0].ListFields()
    assert rig.spec(slot) is None
    rig.settle()
    assert rig.status(1).get("gpuAccess") == "env"


def test_without_cdi_the_answer_is_empty_and_it_is_told(idle_rig):
    idle_rig.runtime.cdi, idle_rig.runtime.version = False, "1.7.20"
    idle_rig.start()
    is_open(idle_rig)
    assert idle_rig.held_on_disk(1) == 8138


def test_open_access_asks_for_no_device(idle_rig):
    idle_rig.access = Access.ENV
    idle_rig.cards[1]["device"] = str(idle_rig.folder / "later")
    idle_rig.write_cards()
    idle_rig.start()
    is_open(idle_rig)
    assert idle_rig.status(1).get("health") == "Healthy"


def test_a_pod_that_was_bound_for_cdi_is_not_started_without_its_card(idle_rig):
    """Its environment, which would name the card here, says "void"."""
    pod = idle_rig.bind("a", [(1, 8138)])
    idle_rig.access = Access.ENV
    idle_rig.start()
    assert "was bound while this node had CDI" in refusal(lambda: idle_rig.run(pod))[1]
    assert idle_rig.held_on_disk(1) == 0


@pytest.fixture
def open_rig(idle_rig) -> Rig:
    idle_rig.access = Access.ENV
    return idle_rig.start()


@pytest.mark.parametrize("started", [True, False], ids=["started before", "never started"])
def test_a_kubelet_that_has_not_seen_a_restore_gives_no_container_its_former_card(open_rig, started):
    """It told the container its former card, which another pod then got."""
    rig = open_rig
    pod = rig.bind("a", [(0, P100)])
    slot = rig.kubelet.admit(pod, "main")
    rig.runtime.make_sandbox(pod)  # the kubelet knows the pod so
    if started:
        rig.see()
        rig.kubelet.pre_start(slot)
    again = rig.bind_again(pod, [(1, P100)])
    rig.settle()
    code, message = refusal(lambda: rig.kubelet.pre_start(slot))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "pod default/a was bound to this node again with other GPUs" in message
    assert "delete the pod, so that it is placed again" in message
    assert (rig.held_on_disk(0), rig.held_on_disk(1)) == (P100 * started, 0)
    assert [share["name"] for share in rig.status(0)["reported"]] == ["a"] * started
    rig.runtime.kill(pod["metadata"]["uid"])
    rig.runtime.make_sandbox(again)  # the kubelet has seen it by now
    rig.kubelet.pre_start(slot)
    assert (rig.held_on_disk(0), rig.held_on_disk(1)) == (0, P100)


def test_a_container_starts_again_while_the_api_server_is_away(open_rig):
    slot = open_rig.run(open_rig.bind("a", [(0, P100)]))
    open_rig.api.down = True
    open_rig.kubelet.pre_start(slot)
    assert open_rig.held_on_disk(0) == P100


def test_no_container_starts_whose_sandbox_is_unknown(open_rig):
    slot = open_rig.run(open_rig.bind("a", [(0, P100)]))
    open_rig.runtime.silent = True
    assert "ListPodSandbox: silent" in refusal(lambda: open_rig.kubelet.pre_start(slot))[1]
    open_rig.runtime.silent = False
    open_rig.runtime.sandboxes.clear()
    assert "has no ready sandbox of it yet" in refusal(lambda: open_rig.kubelet.pre_start(slot))[1]


@pytest.mark.parametrize("annotations", [{}, {names.ASSIGNMENT: "{"}], ids=["none", "unreadable"])
def test_no_container_starts_whose_sandbox_names_no_card(open_rig, annotations):
    pod = open_rig.bind("a", [(0, P100)])
    open_rig.runtime.make_sandbox(pod | {"metadata": pod["metadata"] | {"annotations": annotations}})
    assert "may give its containers the GPUs of the former binding" in refusal(lambda: open_rig.run(pod))[1]


def test_one_card_without_a_device_opens_nothing_and_recovers(idle_rig):
    rig = idle_rig
    device, rig.cards[1]["device"] = rig.cards[1]["device"], str(rig.folder / "later")
    rig.write_cards()
    rig.start()
    assert rig.status(1).get("health") == "Unhealthy"
    assert "later: No such file" in rig.status(1)["reason"]
    assert rig.status(0)["gpuAccess"] == rig.status(1)["gpuAccess"] == "cdi"
    assert rig.spec(rig.run(rig.bind("a", [(0, 100)])))
    assert not any("later" in problem for problem in rig.agent.problems())
    pod = rig.bind("b", [(1, 100)])
    assert "later: No such file" in refusal(lambda: rig.run(pod))[1]
    assert rig.kubelet.allocation.container_responses[0].cdi_devices
    (rig.folder / "later").symlink_to(device)
    rig.settle()
    assert rig.status(1).get("health") == "Healthy"
    rig.kubelet.pre_start(max(rig.kubelet.holders))


def test_without_any_device_it_is_not_ready_and_nothing_is_open(idle_rig):
    rig = idle_rig
    devices = [card["device"] for card in rig.cards]
    for index, card in enumerate(rig.cards):
        card["device"] = str(rig.folder / f"later{index}")
    rig.write_cards()
    rig.start()
    assert [rig.status(index).get("health") for index in (0, 1)] == ["Unhealthy"] * 2
    assert rig.status(0)["gpuAccess"] == "cdi"
    assert any("later0: No such file" in problem for problem in rig.agent.problems())
    for index, device in enumerate(devices):
        (rig.folder / f"later{index}").symlink_to(device)
    rig.settle()
    assert rig.problems() == []

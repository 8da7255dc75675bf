"""Devices other than GPUs: the matching against a search of every choice, and rule 1 for any order of events."""

from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cardwise.core.api import assignment
from cardwise.core.api.assignment import AssignedDevice, Assignment
from cardwise.core.api.cards import Card
from cardwise.core.api.request import ContainerRequest, DeviceRequest, PodRequest
from cardwise.core.placement import placement
from cardwise.core.placement.devices import WantedDevices, is_valid_grant, sort_devices
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import Placement, Unplaceable
from cardwise.core.values.refusals import Refusal
from tests.core.others import device
from tests.examples import examples

NODES = ["n1", "n2", "n3"]
CLASSES = ["a", "b", "c"]
MIB = 100

described = st.lists(
    st.tuples(st.sets(st.sampled_from(CLASSES), min_size=1), st.sampled_from([True, True, True, False])), max_size=6
)
wants = st.lists(
    st.builds(DeviceRequest, st.sampled_from(["0", "1", "init-0"]), st.sampled_from(CLASSES), st.integers(1, 2)),
    min_size=1,
    max_size=4,
    unique_by=lambda wanted_device: (wanted_device.key, wanted_device.resource_class),
)


def devices_of(description, node="n1"):
    return [device(i, *classes, node=node, healthy=healthy) for i, (classes, healthy) in enumerate(description)]


def can_be_given(units, usable):
    """Whether each unit of the classes can get its own device, by trying every choice."""
    if not units:
        return True
    return any(
        can_be_given(units[1:], [other for other in usable if other is not device])
        for device in usable
        if units[0] in device.classes
    )


def check_granted(granted, wanted_devices, usable):
    """Check the granted devices: the requested number, of the class, usable, and none twice."""
    by_uuid = {device.uuid: device for device in usable}
    shares = [share for of_container in granted.values() for share in of_container]
    assert len({share.uuid for share in shares}) == len(shares)
    assert all(share.resource_class in by_uuid[share.uuid].classes for share in shares)
    assert sorted(
        (key, share.resource_class) for key, of_container in granted.items() for share in of_container
    ) == sorted((device.key, device.resource_class) for device in wanted_devices for _ in range(device.count))


@given(description=described, wanted_devices=wants, held=st.sets(st.integers(0, 5), max_size=3))
@settings(deadline=None, max_examples=examples(150, soak=2000))
def test_devices_are_given_exactly_where_some_choice_would_do(description, wanted_devices, held):
    here = devices_of(description)
    used = {here[i].uuid: 1 for i in held if i < len(here)}
    units = [device.resource_class for device in wanted_devices for _ in range(device.count)]
    usable = [device for device in here if device.healthy and device.uuid not in used]
    wanted = WantedDevices(wanted_devices)
    granted = wanted.grant(here, used)
    room = wanted.available(here, used)
    if can_be_given(units, usable):
        event("given")
        assert not isinstance(granted, Refusal)
        assert room == granted[0] == sum(not device.classes.isdisjoint(units) for device in usable)
        check_granted(granted[1], wanted_devices, usable)
        assert wanted.grant(here, used) == granted, "another time the same"
    else:
        reason = Refusal.NO_DEVICE if can_be_given(units, here) else Refusal.NO_SUCH_DEVICE
        event(reason.name)
        assert granted is room is reason


pods = st.builds(
    lambda devices, cards: PodRequest(containers=cards, devices=tuple(devices)),
    wants,
    st.sampled_from([(), (), (ContainerRequest(key="0", name="x", cards=1, mem=30),)]),
)


class DeviceMachine(RuleBasedStateMachine):
    """Compares the ledger with a new one that is made from the machine's own records."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger()
        self.cards = {}
        self.devices = {}
        self.held = {}
        self.next_uid = 0

    def picture(self, ledger):
        return {
            node.name: (list(node.devices), dict(node.device_holds), node.cards, list(node.free), sorted(node.holdings))
            for node in ledger.nodes()
        }

    @rule(node=st.sampled_from(NODES), description=described)
    def devices_change(self, node, description):
        self.devices[node] = devices_of(description, node)
        self.ledger.set_other_devices(node, reversed(self.devices[node]))

    @rule(node=st.sampled_from(NODES), there=st.booleans())
    def cards_change(self, node, there):
        self.cards[node] = [Card(index=0, uuid=f"GPU-{node}", mem=MIB)] if there else []
        self.ledger.set_cards(node, self.cards[node])

    @rule(pod_request=pods, policy=st.sampled_from(["binpack", "spread"]))
    def pod_is_placed(self, pod_request, policy):
        before = self.picture(self.ledger)
        placed = placement.place(self.ledger, NODES, pod_request, policy)
        scores, refusals = placement.Scorer(self.ledger.kinds, pod_request, policy).score_all(self.ledger, NODES)
        if isinstance(placed, Unplaceable):
            assert (scores, refusals) == ({}, placed.refusals)
            assert set(refusals) == set(NODES)
            return
        best = max(scores.values())
        assert (placed.score, placed.node) == (best, min(name for name in scores if scores[name] == best))
        for name in NODES:
            on_node = placement.place_on(self.ledger.kinds, self.ledger.node(name), pod_request, policy)
            score = scores.get(name, refusals.get(name))
            assert (on_node.score if isinstance(on_node, Placement) else on_node) == score
        node = self.ledger.node(placed.node)
        usable = [entry for entry in node.devices if entry.healthy and entry.uuid not in node.device_holds]
        check_granted(placed.assignment.devices, pod_request.devices, usable)
        assert placed.assignment.containers.keys() == {entry.key for entry in pod_request.containers}
        self.next_uid += 1
        holding = Holding(f"u{self.next_uid}", "d", "p", placed.node, placed.assignment)
        with self.ledger.what_if(added=[holding]):
            pass
        assert self.picture(self.ledger) == before
        self.ledger.set_holding(holding)
        self.held[holding.uid] = holding
        assert is_valid_grant(holding.assignment, node.devices, node.device_holds)

    @rule(node=st.sampled_from(NODES), numbers=st.sets(st.integers(0, 5), min_size=1, max_size=2))
    def pod_was_bound_before(self, node, numbers):
        """Add a pod that was bound before. Its devices may be unknown yet. No two pods have the same device."""
        shares = tuple(AssignedDevice("a", device(i, node=node).uuid) for i in sorted(numbers))
        others = {share.uuid for h in self.held.values() for share in h.assignment.non_gpu_devices()}
        if others.isdisjoint(share.uuid for share in shares):
            self.next_uid += 1
            uid = f"u{self.next_uid}"
            self.held[uid] = Holding(uid, "d", "p", node, Assignment({}, {"0": shares}))
            self.ledger.set_holding(self.held[uid])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def pod_ends(self, data):
        uid = data.draw(st.sampled_from(sorted(self.held)))
        before = self.picture(self.ledger)
        with self.ledger.what_if(released=[uid]):
            pass
        assert self.picture(self.ledger) == before
        self.ledger.release(uid)
        del self.held[uid]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), description=described)
    def devices_change_within_a_what_if(self, data, description):
        uid = data.draw(st.sampled_from(sorted(self.held)))
        with self.ledger.what_if(released=[uid]):
            self.devices_change(self.held[uid].node, description)

    @invariant()
    def counted_is_what_a_recount_gives(self):
        anew = Ledger()
        for holding in self.held.values():
            anew.set_holding(holding)
        for node, devices in self.devices.items():
            anew.set_other_devices(node, devices)
        for node, cards in self.cards.items():
            anew.set_cards(node, cards)
        assert self.picture(self.ledger) == self.picture(anew)
        for node in NODES:
            uuids = sorted(
                share.uuid for h in self.held.values() if h.node == node for share in h.assignment.non_gpu_devices()
            )
            state = self.ledger.node(node)
            assert sorted(state.device_holds if state is not None else ()) == uuids, (
                "every one that is held, and each once"
            )
            assert list(state.devices if state is not None else ()) == sort_devices(self.devices.get(node, ()))

    @invariant()
    def no_device_is_given_twice(self):
        assert self.ledger.violations() == []


TestDevices = DeviceMachine.TestCase
TestDevices.settings = settings(max_examples=examples(35, soak=1000), stateful_step_count=30, deadline=None)


device_shares = st.builds(
    AssignedDevice,
    st.sampled_from(["rdma", "nic.fast"]),
    st.text(st.characters(codec="ascii"), min_size=1, max_size=20),
)


@given(
    st.dictionaries(
        st.sampled_from(["0", "1", "init-12"]), st.lists(device_shares, min_size=1, max_size=4).map(tuple), min_size=1
    )
)
def test_the_codec_round_trips_with_devices_only(devices):
    given_devices = Assignment({}, devices)
    assert assignment.decode(assignment.encode(given_devices, assume_time_ns=1)) == given_devices

"""The victims of a preemption against a slow reference: all sets of pods of a small full node, each tried out."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.cards import Card
from cardwise.core.api.isolation import Isolation
from cardwise.core.api.mpsprofile import IMAGE_USER, CardMps
from cardwise.core.api.request import ContainerRequest, DeviceRequest, Load, PodRequest
from cardwise.core.api.sharing import Tenant
from cardwise.core.placement import placement
from cardwise.core.placement.devices import Device
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import Placement
from cardwise.core.preemption import preemption
from cardwise.core.preemption.preemption import FullNode, Preemptor, Resident
from cardwise.core.values.refusals import Refusal
from tests.build import IN_USE, OUT_OF_USE
from tests.examples import examples

MEM = 1000  # MiB of the smallest card
NODE = "n"
POLICY = "binpack"
TOP = 5  # priority of the newcomer
CPU, PODS = 8, 10
DEVICES = [Device(uuid=f"NIC-{i}", kind="nic", index=i, classes=frozenset({"nic"})) for i in (0, 1)]


def asking(mem: int = 0, *, cards: int = 1, core: int = 0, of: str = "", devices: int = 0) -> PodRequest:
    """One container; `mem` for each of its cards, none for whole ones."""
    container = ContainerRequest(key="0", name="c", cards=cards, mem=mem * cards, core=core * cards, resource_class=of)
    return PodRequest(containers=(container,), devices=(DeviceRequest("0", "nic", devices),) if devices else ())


@dataclass
class World:
    """A node, those on it, and who wants to come."""

    ledger: Ledger
    full: FullNode
    newcomer: Preemptor

    def fits(self, gone: frozenset[str]) -> bool:
        """By the engine and the sums, as it is when these are gone."""
        free = self.full.free
        leaving = [resident for resident in self.full.residents if resident.uid in gone or resident.is_leaving]
        for load in (resident.load for resident in leaving):
            free = Load(free.cpu + load.cpu, free.memory + load.memory, free.pods + load.pods)
        with self.ledger.what_if(released=[resident.uid for resident in leaving]):
            wanted = self.newcomer.load
            if (wanted.cpu and free.cpu < wanted.cpu) or free.pods < wanted.pods:
                return False
            if self.lacks_cores(gone):
                return False
            placed = placement.place_on(self.ledger.kinds, self.ledger.node(NODE), self.newcomer.request, POLICY)
            return not isinstance(placed, Refusal)

    def lacks_cores(self, gone: frozenset[str]) -> bool:
        """By the sum of the node, which may be less than what its cards have: fewer are given than when pods came."""
        node, request = self.full.node, self.newcomer.request
        assert node is not None
        assert request is not None
        staying = [r.holding for r in self.full.residents if r.holding and not (r.uid in gone or r.is_leaving)]
        held = sum(share.core for holding in staying for share in holding.assignment.shares() if not share.whole)
        requested = sum(container.core for container in request.containers)
        return requested > max(0, node.core * len(node.cards) - held)

    def harm(self, gone: frozenset[str]) -> tuple[int, bool, int, int]:
        victims = [resident for resident in self.full.residents if resident.uid in gone]
        charged = Counter(budget for resident in victims for budget in resident.budgets)
        violations = sum(max(0, count - self.full.allowed.get(budget, 0)) for budget, count in charged.items())
        return violations, bool(victims), max((victim.priority for victim in victims), default=0), len(victims)

    def reference(self) -> tuple[int, bool, int, int] | None:
        """The least harm of all sets."""
        may = [
            resident.uid
            for resident in self.full.residents
            if resident.priority < TOP and not (resident.is_leaving or resident.fixed)
        ]
        sets = (frozenset(some) for size in range(len(may) + 1) for some in combinations(may, size))
        return min((self.harm(some) for some in sets if self.fits(some)), default=None)


def differing(draw: st.DrawFn, pod_request: PodRequest) -> PodRequest:
    """In what it says of MPS, whom it runs as, and with whom it shares cards."""
    return replace(
        pod_request,
        isolation=draw(st.sampled_from(list(Isolation))),
        user=draw(st.sampled_from([IMAGE_USER, 7])),
        tenant=Tenant(draw(st.sampled_from(["default", "team"])), draw(st.integers(0, 3)) == 0),
    )


# What a manager says of all cards of the node: mostly there is none.
managers = st.none() | st.sampled_from(
    [None, CardMps(True), CardMps(True, multi_user=False), CardMps(True, serves_several=True), CardMps(False)]
)
requests = st.one_of(
    st.builds(asking, st.integers(1, 16).map(lambda n: n * MEM // 8), core=st.sampled_from([0, 0, 30, 60])),
    st.builds(asking, st.integers(1, 8).map(lambda n: n * MEM // 8), cards=st.just(2)),
    st.builds(asking, st.just(0), cards=st.integers(1, 2)),
    st.builds(asking, st.integers(1, 8).map(lambda n: n * MEM // 8), of=st.just("big")),
    st.builds(asking, st.just(MEM // 4), devices=st.integers(1, 2)),
)
several = st.lists(
    st.one_of(
        st.builds(asking, st.just(0), cards=st.integers(1, 2)),
        st.builds(asking, st.integers(1, 8).map(lambda n: n * MEM // 8), of=st.just("big")),
        st.builds(asking, st.integers(1, 8).map(lambda n: n * MEM // 8), cards=st.integers(1, 2)),
    ),
    min_size=2,
    max_size=3,
).map(lambda drawn: PodRequest(containers=tuple(
    replace(request.containers[0], key=str(i), name=f"c{i}") for i, request in enumerate(drawn)
)))  # fmt: skip


@st.composite
def worlds(draw: st.DrawFn) -> World:
    max_clients = draw(st.sampled_from([3, 48]))
    ledger = Ledger(max_clients=max_clients)
    sizes = draw(st.lists(st.sampled_from([MEM, MEM, 2 * MEM]), min_size=1, max_size=4))
    manager = draw(managers)
    cards = [
        Card(index=i, uuid=f"GPU-{i}", mem=mem, **draw(st.sampled_from([*[IN_USE] * 8, *OUT_OF_USE])),
             classes=frozenset({"big"} if mem > MEM else ()), mps=manager)
        for i, mem in enumerate(sizes)
    ]  # fmt: skip
    ledger.set_cards(NODE, cards)
    ledger.set_other_devices(NODE, DEVICES)
    residents = []
    cpu, pods = CPU, PODS
    for i in range(draw(st.integers(5, 10))):
        uid = f"r{i}"
        load = Load(draw(st.integers(0, 2)), 0, 1)
        if load.cpu > cpu:
            continue
        holding = None
        if draw(st.integers(0, 7)):
            policy = draw(st.sampled_from(["binpack", "spread"]))
            pod_request = differing(draw, draw(requests))
            placed = placement.place_on(ledger.kinds, ledger.node(NODE), pod_request, policy)
            if not isinstance(placed, Placement):
                continue
            holding = Holding(uid, "default", uid, NODE, placed.assignment, mps_client=pod_request.mps_client)
            ledger.set_holding(holding)
        cpu, pods = cpu - load.cpu, pods - 1
        residents.append(
            Resident(
                uid,
                draw(st.sampled_from([0, 0, 1, 2, TOP])),
                load,
                holding,
                draw(st.sampled_from([(), (), ("a",), ("b",)])),
                is_leaving=draw(st.integers(0, 9)) == 0,
                fixed=draw(st.integers(0, 9)) == 0,
            )
        )
    if draw(st.booleans()):  # fewer cores are given of a card than when they came
        ledger = Ledger(max_clients=max_clients, core=30)
        ledger.set_cards(NODE, cards)
        ledger.set_other_devices(NODE, DEVICES)
        for resident in residents:
            if resident.holding is not None:
                ledger.set_holding(resident.holding)
    full = FullNode(
        kinds=ledger.kinds,
        node=ledger.node(NODE),
        free=Load(cpu, 0, pods),
        residents=residents,
        allowed={"a": draw(st.integers(0, 2)), "b": draw(st.integers(0, 1))},
    )
    load = Load(draw(st.sampled_from([0, 0, 2, 6])), 0, 1)
    wanted = differing(draw, draw(st.one_of(requests, requests, several)))
    newcomer = Preemptor(request=wanted, load=load, priority=TOP)
    return World(ledger, full, newcomer)


@settings(max_examples=examples(150, soak=2000))
@given(world=worlds())
def test_no_smaller_set_of_victims_is_enough(world: World) -> None:
    victims = preemption.least_harmful_victims(world.full, world.newcomer)
    least = world.reference()
    assert (victims.harm if victims is not None else None) == least
    if victims is None:
        return
    gone = frozenset(victims.uids)
    assert world.harm(gone) == victims.harm
    assert world.fits(gone)
    assert not any(world.fits(gone - {uid}) for uid in gone)
    may = {
        resident.uid
        for resident in world.full.residents
        if resident.priority < TOP and not (resident.is_leaving or resident.fixed)
    }
    assert gone <= may


def test_cores_that_no_pod_requests_evict_no_pod() -> None:
    """Fewer are given of a card now than those on it have."""
    ledger = Ledger(core=30)
    ledger.set_cards(NODE, [Card(index=0, uuid="GPU-0", mem=MEM)])
    residents = []
    for uid, priority, mem, core in (("trains", 4, 600, 60), ("idles", 0, 300, 0)):
        share = CardShare(0, "GPU-0", mem, core, MEM)
        holding = Holding(uid, "default", uid, NODE, Assignment({"0": (share,)}))
        ledger.set_holding(holding)
        residents.append(Resident(uid, priority, Load(0, 0, 1), holding))
    full = FullNode(kinds=ledger.kinds, node=ledger.node(NODE), free=Load(CPU, 0, PODS), residents=residents)
    victims = preemption.least_harmful_victims(full, Preemptor(request=asking(400), load=Load(0, 0, 1), priority=TOP))
    assert victims is not None
    assert victims.uids == ("idles",)

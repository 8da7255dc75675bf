"""Rules 1 and 4 of docs/architecture.md for gangs, for any order of events.

The world is `tests/extender/gangworlds`: the extender's real state between an API server and a kube-scheduler that
assumes, gives up and comes again; the extender is killed and started anew in between.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.build import P100
from tests.examples import examples
from tests.extender.gangworlds import NodeSpec, World, member, single
from tests.extender.worlds import as_card, resource

MINIMUM = {"a": 3, "b": 2, "c": 4}
NODES = {"n1": 2, "n2": 2, "n3": 1}
ROLLBACK = 60.0
gangs_of = st.sampled_from(sorted(MINIMUM))
sizes = st.sampled_from([{"gpu_mem": P100}, {"gpu_mem": P100 // 2}, {"whole_gpu": 1}, {}])


class Watched(World):
    """A world that says when rule 4 is broken."""

    def __init__(self, *args, **kwargs):
        self.begun = set()  # gangs of which something may be bound
        super().__init__(*args, **kwargs)

    def gang_of(self, made):
        return made["metadata"]["labels"].get("cardwise.dev/gang", "")

    def alive(self, gang):
        return [
            made
            for made in self.pods.values()
            if self.gang_of(made) == gang
            and not made["metadata"].get("deletionTimestamp")
            and made["status"]["phase"] != "Failed"
        ]

    def begin_bind(self, made, node):
        super().begin_bind(made, node)
        gang = self.gang_of(made)
        bound = [each for each in self.alive(gang) if each["spec"].get("nodeName")]
        hold = self.binding[-1].hold if self.binding else None
        if hold is not None and hold.go and self.gang_of(self.binding[-1].pod) == gang:
            together = {bind.pod["metadata"]["name"] for bind in self.binding if bind.hold is hold}
            assert len(together) + len(bound) >= MINIMUM[gang], "let go before all had come"
            self.begun.add(gang)
        elif bound:  # by whomever: the rest follows, also if that one goes meanwhile
            self.begun.add(gang)

    def post(self, bind, *, land=True, lost=False):
        gang = self.gang_of(bind.pod)
        alone = not any(each["spec"].get("nodeName") for each in self.alive(gang))
        posted = super().post(bind, land=land, lost=lost)
        if posted and gang and gang not in self.begun:
            assert not alone, "posted, though the gang was not let go and nothing of it was bound"
        return posted

    def check(self):
        for gang in list(self.begun):
            under_way = any(self.gang_of(bind.pod) == gang for bind in self.binding)
            bound = any(each["spec"].get("nodeName") for each in self.alive(gang))
            unheard = any(self.gang_of(made) == gang for made, *_ in self.unheard.values())
            if not bound and not under_way and not unheard and self.phase(gang) != "Binding":
                self.begun.discard(gang)

    def land(self, name):
        self.begun.add(self.gang_of(self.unheard[name][0]))
        super().land(name)

    def keep(self):
        super().keep()
        due = [key for key, gang in self.state._gangs._gangs.items() if gang.rollback_due(self.clock.now())]
        assert due == [], "rolled back, and at once again"


class Gangs(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.world = Watched(NODES, rollback=ROLLBACK, max_waiting=8)
        self.count = 0
        self.ill = set()

    @rule(gang=gangs_of, size=sizes)
    def create(self, gang, size):
        self.count += 1
        made = member(f"{gang}-{self.count}", gang, MINIMUM[gang], created=self.count, **size)
        self.world.create(made)

    @rule(gang=gangs_of, size=sizes)
    def create_all(self, gang, size):
        for _ in range(MINIMUM[gang]):
            self.create(gang, size)

    @rule(data=st.data())
    def create_single(self, data):
        self.count += 1
        self.world.create(single(f"s-{self.count}", created=self.count, gpu_mem=P100))

    def _some(self, data, bound=None):
        names = [
            name
            for name, made in self.world.pods.items()
            if bound is None or bool(made["spec"].get("nodeName")) is bound
        ]
        return data.draw(st.sampled_from(sorted(names))) if names else None

    @rule(data=st.data(), how=st.sampled_from(["delete", "terminate", "Failed", "Succeeded"]))
    def lose(self, data, how):
        name = self._some(data)
        if name is None:
            return
        if how == "delete":
            self.world.delete(name)
        elif how == "terminate":
            self.world.terminate(name)
        elif self.world.pods[name]["spec"].get("nodeName"):
            self.world.finish(name, how)

    @rule(data=st.data())
    def schedule(self, data):
        names = self.world.schedulable() + [bind.pod["metadata"]["name"] for bind in self.world.binding]
        names = [name for name in names if name in self.world.pods]
        if names:
            self.world.schedule(data.draw(st.sampled_from(sorted(names))))

    @rule()
    def schedule_all(self):
        for name in self.world.schedulable():
            self.world.schedule(name)

    @rule(data=st.data())
    def lose_a_connection(self, data):
        waiting = [bind for bind in self.world.binding if bind.hold is not None]
        if waiting:
            bind = data.draw(st.sampled_from(waiting))
            self.world.state.gangs.cancel(bind.hold, "the connection closed")

    @rule(how=st.sampled_from(["lands", "lands", "does not", "unheard"]))
    def settle(self, how):
        self.world.settle(land=how == "lands", lost=how == "unheard")

    @rule(data=st.data(), how=st.sampled_from(["lands", "does not", "unheard"]))
    def settle_one(self, data, how):
        if self.world.binding:
            bind = data.draw(st.sampled_from(self.world.binding))
            self.world.settle(land=how == "lands", lost=how == "unheard", only=bind.pod["metadata"]["name"])

    @rule(data=st.data())
    def land(self, data):
        if self.world.unheard:
            self.world.land(data.draw(st.sampled_from(sorted(self.world.unheard))))

    @rule(gang=gangs_of, size=sizes)
    def outage(self, gang, size):
        """The API server takes the Bindings of a gang and answers nothing for longer than a gang is given to follow."""
        self.create_all(gang, size)
        self.world.keep()
        self.schedule_all()
        for name in [bind.pod["metadata"]["name"] for bind in self.world.binding]:
            if name.startswith(gang):
                self.world.settle(lost=True, only=name)
        self.world.clock.advance(ROLLBACK + 1)
        self.world.keep()

    @rule()
    def look_up(self):
        self.world.look_up()

    @rule(seconds=st.sampled_from([0.5, 5.0, 31.0, 70.0]))
    def wait(self, seconds):
        self.world.clock.advance(seconds)

    @rule(data=st.data(), node=st.sampled_from(sorted(NODES)))
    def bind_by_somebody_else(self, data, node):
        """Without a card, and whatever we had in mind."""
        name = self._some(data, bound=False)
        under_way = {bind.pod["metadata"]["name"] for bind in self.world.binding}
        if name is not None and self.world.gang_of(self.world.pods[name]) and name not in under_way:
            made = self.world.pods[name]
            made["spec"]["nodeName"] = node
            made["status"] = {"phase": "Running", "containerStatuses": [{"name": "main", "state": {"running": {}}}]}
            self.world.tell(made)

    @rule()
    def keep(self):
        self.world.state.tick()
        self.world.keep()

    @rule()
    def tell_groups(self):
        self.world.tell_groups()

    @rule(node=st.sampled_from(sorted(NODES)))
    def change_health(self, node):
        self.ill ^= {node}
        health = "Unhealthy" if node in self.ill else "Healthy"
        self.world.state.set_card(*as_card(resource(0, node=node, health=health)))

    @rule(node=st.sampled_from(sorted(NODES)), cpu=st.sampled_from([0, 1, 64]))
    def fill(self, node, cpu):
        """The scheduler does not offer the node to everybody any more, for a reason that only it knows."""
        self.world.nodes[node].cpu = cpu

    @rule(gang=gangs_of)
    def schedule_a_part(self, gang):
        names = [name for name in self.world.schedulable() if name.startswith(gang)]
        for name in names[: MINIMUM[gang] - 1]:
            self.world.schedule(name)

    @rule()
    def restart(self):
        self.world.restart()
        for node in self.ill:
            self.world.state.set_card(*as_card(resource(0, node=node, health="Unhealthy")))

    @invariant()
    def no_card_is_over_full(self):
        if hasattr(self, "world"):
            assert self.world.over_full() == []

    @invariant()
    def what_is_held_is_planned_and_only_whole_gangs_plan(self):
        if not hasattr(self, "world"):
            return
        gangs = self.world.state._gangs._gangs
        planned = {uid: node for gang in gangs.values() for uid, node in gang.plan.items()}
        assert self.world.state._reservations._plans.keys() <= gangs.keys()
        with self.world.state.view() as ledger:
            for holding in ledger.holdings():
                if holding.mark == "gang":
                    assert planned.get(holding.uid) == holding.node, "held by nobody's plan"
            for gang in gangs.values():
                for uid in gang.plan:
                    if gang.members[uid].request is not None:
                        assert ledger.holding(uid) is not None, "planned and not held"
        assert self.world.state._loads._planned <= planned.keys() | {
            uid for uid in self.world.state._loads._planned if self.world.state.decided(uid)
        }
        for gang in gangs.values():
            if gang.plan and not gang.forward:
                assert len(gang.plan) + len(gang.bound) >= gang.minimum, "a part of a gang holds cards"
                assert gang.complete
            assert not (gang.ran and gang.plan)
            if gang.forward and not gang.committed and not gang.bound:
                may = [uid for uid in gang.members if self.world.state.decided(uid)]
                assert may, "goes forward, though nothing of it is bound or may be"

    @invariant()
    def nobody_waits_for_a_hold_that_is_over(self):
        if hasattr(self, "world"):
            self.world.check()
            gangs = self.world.state._gangs._gangs
            holds = set(self.world.state._gangs._holds.values())
            assert {hold.key for hold in holds} == {
                gang.key for gang in gangs.values() if gang.plan and not gang.forward
            }, "every hold has its plan"
            for bind in self.world.binding:
                assert bind.hold is None or bind.hold.done.is_set() or bind.hold in holds

    def teardown(self):
        """With a fair scheduler, room and time, every whole gang runs, and nothing stays half bound."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for node in sorted(self.ill):
            world.state.set_card(*as_card(resource(0, node=node)))
        for name in NODES:
            world.nodes[name].cpu = 64
        for name in [name for name, made in world.pods.items() if made["metadata"].get("deletionTimestamp")]:
            world.delete(name)
        world.add_node("spare", NodeSpec(250, cpu=1000))
        for _ in range(40):
            world.look_up()
            world.settle()
            world.run(5, seconds=1.0)
        for gang in world.state._gangs._gangs.values():
            there = list(gang.there)
            if there and len(there) >= gang.minimum:
                assert str(gang.phase) == "Running", f"{gang.key} {gang.phase} {gang.reason}"
                assert all(member.node for member in there)
            elif not gang.ran:
                assert not gang.bound, "half bound for ever"
                assert not gang.plan
        assert world.over_full() == []


TestGangs = Gangs.TestCase
TestGangs.settings = settings(max_examples=examples(30, soak=400), stateful_step_count=40, deadline=None)


@settings(max_examples=examples(25, soak=400), deadline=None)
@given(
    order=st.permutations([f"{gang}{i}" for gang in "abcd" for i in range(3)]),
    data=st.data(),
    size=st.sampled_from([P100, P100 // 2 + 1]),
)
def test_gangs_that_each_fit_alone_never_block_each_other(order, data, size):
    """Whatever order they come and are asked in; who has run for a while ends."""
    world = World({"n1": 2, "n2": 2})
    for i, name in enumerate(order):
        world.create(member(name, name[0], 3, created=i, gpu_mem=size))
        if data.draw(st.booleans()):
            for each in data.draw(st.permutations(world.schedulable())):
                world.schedule(each)
            if data.draw(st.booleans()):
                world.settle()
        if data.draw(st.integers(0, 5)) == 0:
            world.restart()
    done = set()
    for _ in range(60):
        world.state.tick()
        world.run(3)
        for gang in "abcd":
            names = [f"{gang}{i}" for i in range(3)]
            bound = [name for name in names if name in world.bound()]
            assert len(bound) in (0, 3) or world.phase(gang) in ("Binding", "Rolling")
            if len(bound) == 3:
                done.add(gang)
                world.delete(*names)
        if len(done) == 4:
            return
    raise AssertionError(f"only {done} ran")

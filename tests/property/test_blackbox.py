"""All rules of the architecture that an extender can break, with whole extenders, from outside (`blackbox`)."""

import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from cardwise.kube import paths
from tests.build import P100
from tests.examples import examples
from tests.property.blackbox import World, replay

NODES = {"n1": [P100, P100], "n2": [P100, 8138]}
HALF = P100 // 2

which = st.integers(0, 7)
nodes = st.sampled_from(sorted(NODES))
mems = st.sampled_from([1000, 4069, HALF, HALF + 1, 12207, P100])
collections = st.sampled_from([paths.pods(), paths.extendedresources(), paths.nodes()])
verbs_and_paths = st.sampled_from(
    [
        ("create", "*/binding"),
        ("create", "*/binding"),
        ("get", "*/pods/*"),
        ("patch", "*/pods/*"),
        ("update", "*/leases/*"),
        ("list", "*/pods"),
        ("", "*"),
    ]
)
faults = st.sampled_from(
    [
        {"status": 409},
        {"status": 429, "retry_after": 1},
        {"status": 500},
        {"refused": True},
        {"lost": True},
        {"lost": True},
        {"seconds": 3.0},
        {"seconds": 30.0, "lost": True},
    ]
)


class Machine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed):
        self.world = World(seed, NODES, history=[{"seed": seed, "nodes": NODES}])
        self.opened = self.world.open()
        self.opened.__enter__()

    def teardown(self):
        if not hasattr(self, "opened"):
            return
        try:
            self.world.do("quiet")
        finally:
            self.opened.__exit__(None, None, None)

    # Users, and what they ask for.

    @rule(mem=mems)
    def a_share(self, mem):
        self.world.do("creates", gpu_mem=mem)

    @rule(mem=mems, core=st.sampled_from([30, 60]))
    def a_share_of_cores(self, mem, core):
        self.world.do("creates", gpu_mem=mem, gpu_core=core)

    @rule(mem=st.sampled_from([8138, 16276, 2 * P100]))
    def a_share_of_two_cards(self, mem):
        self.world.do("creates", gpu_mem=mem, split=2)

    @rule(count=st.integers(1, 2))
    def whole_cards(self, count):
        self.world.do("creates", whole_gpu=count)

    @rule(mem=mems)
    def an_urgent_share(self, mem):
        self.world.do("creates", gpu_mem=mem, priority=10)

    @rule()
    def no_card(self):
        self.world.do("creates")

    @rule(which=which, how=st.sampled_from(["deletes", "deletes", "deletes_by_force", "touches"]))
    def a_pod_is_changed(self, which, how):
        self.world.do(how, which=which)

    # kube-scheduler.

    @rule(which=which, whole=st.booleans())
    def the_scheduler_tries(self, which, whole):
        self.world.do("tries", which=which, to=0, whole=whole)

    @rule()
    def the_scheduler_tries_all(self):
        for which in range(8):
            self.world.do("tries", which=which, to=0, whole=False)

    @rule(which=which)
    def a_bind_comes_again(self, which):
        self.world.do("binds_again", which=which, to=0)

    @rule()
    def the_scheduler_restarts(self):
        self.world.do("scheduler_restarts")

    # Nodes.

    @rule(which=which, how=st.sampled_from(["runs", "ends"]))
    def the_kubelet_works(self, which, how):
        self.world.do(how, which=which)

    @rule(node=nodes, how=st.sampled_from(["node_comes_or_goes", "node_is_cordoned"]))
    def a_node_changes(self, node, how):
        self.world.do(how, node=node)

    @rule(node=nodes, index=st.integers(0, 1), what=st.sampled_from(["healthy", "cordoned", "there"]))
    def a_card_changes(self, node, index, what):
        self.world.do("card_changes", node=node, index=index, what=what)

    # What goes wrong.

    @rule(at=verbs_and_paths, fault=faults, times=st.integers(1, 3))
    def requests_fail(self, at, fault, times):
        self.world.do("fails", verb=at[0], path=at[1], times=times, **fault)

    @rule(times=st.integers(1, 2))
    def bindings_stand(self, times):
        self.world.do("stands", times=times)

    @rule(which=which, behind=st.booleans())
    def a_binding_arrives(self, which, behind):
        self.world.do("arrives", which=which, behind=behind)

    @rule(collection=collections)
    def watches_lag(self, collection):
        self.world.do("lag", collections=[collection])

    @rule()
    def watches_catch_up(self):
        self.world.do("catch_up")

    @rule(how=st.sampled_from(["end", "cut", "gone"]), collection=collections)
    def watches_end(self, how, collection):
        self.world.do("watches_end", how=how, collection=collection)

    @rule()
    def versions_are_forgotten(self):
        self.world.do("forget")

    @rule(seconds=st.sampled_from([0.5, 3.0, 8.0]))
    def the_api_server_is_away(self, seconds):
        self.world.do("away", seconds=seconds)

    @rule(how=st.sampled_from(["is_killed", "stops"]))
    def the_extender_restarts(self, how):
        self.world.do(how, which=0)
        self.world.do("starts", which=0)

    # Time.

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def time_passes(self, seconds):
        self.world.do("passes", seconds=seconds, stride=0.05)

    @rule(seconds=st.sampled_from([10.0, 40.0, 90.0]))
    def much_time_passes(self, seconds):
        self.world.do("passes", seconds=seconds, stride=2.0)


TestBlackbox = Machine.TestCase
TestBlackbox.settings = settings(max_examples=examples(30, soak=2000), stateful_step_count=40, deadline=None)


def test_a_history_tells_the_same_each_time():
    steps = [
        {"seed": 3, "nodes": NODES},
        {"do": "creates", "gpu_mem": HALF},
        {"do": "creates", "gpu_mem": HALF + 1},
        {"do": "creates", "whole_gpu": 1},
        {"do": "stands", "times": 1},
        *({"do": "tries", "which": 0, "to": 0, "whole": False} for _ in range(3)),
        {"do": "passes", "seconds": 2.0, "stride": 0.05},
        {"do": "is_killed", "which": 0},
        {"do": "starts", "which": 0},
        {"do": "arrives", "which": 0, "behind": True},
        {"do": "passes", "seconds": 10.0, "stride": 0.5},
        {"do": "quiet"},
    ]
    history = json.loads(json.dumps(steps))
    told = replay(history)
    assert {one.pod for one in told} == {"p1", "p2", "p3"}
    assert replay(history) == told

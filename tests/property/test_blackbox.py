"""All rules of the architecture that an extender can break, with whole extenders, from outside (`blackbox`)."""

import json
from pathlib import Path

import pytest
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from cardwise.kube import paths
from tests.build import P100
from tests.examples import SOAK, examples
from tests.property import blackbox, replay
from tests.property.blackbox import World, today

HALF = P100 // 2
LITTLE = 1000  # MiB
NODES = {"n1": [P100, P100], "n2": [HALF]}
TYPED = {"n1": [P100, {"mem": P100, "model": "V100"}], "n2": [{"mem": HALF, "model": "V100"}]}
WITH_MPS = {"n1": [{"mem": P100, "mps": "Ready"}, {"mem": P100, "mps": "Off"}], "n2": [P100]}
CLUSTERS = [NODES, {"n1": [P100]}, {"n1": [P100], "n2": [P100]}, TYPED, WITH_MPS]
EXCLUSIVE = {"exclusive": True}  # shares cards within its namespace only
CLASSES = {"fast": ["V100"], "any": ["P100", "V100"]}

BROKEN = Path(".hypothesis/blackbox.jsonl")  # the history that broke a rule, for `python -m tests.property.replay`

choice = st.integers(0, 7)
extender = st.integers(0, 1)
to = st.sampled_from([0, 0, 0, 1])
namespaces = st.sampled_from(["default", "team"])
quotas = st.sampled_from([{"shares": 2}, {"memoryMiB": P100}, {"gpus": 1, "shares": 3}, {"class": "fast", "shares": 1}])
kinds = st.sampled_from(
    [*[{}] * 6, {"resource_class": "fast"}, {"resource_class": "any"}, {"mps": "none"}, {"mps": "mps"}, EXCLUSIVE]
)
settings_of_extenders = st.sampled_from(
    [
        {},
        {"bind_deadline": 60.0},
        {"bind_deadline": 60.0, "nominate_above_nodes": 0},
        {"one_best_node": False, "policy": "spread"},
    ]
)
nodes = st.integers(0, 1)
changes = st.sampled_from(["healthy", "cordoned", "there", "mps"])
large = st.sampled_from([HALF + 1, 12207, P100])
mems = st.sampled_from([1000, 4069, HALF, HALF + 1, 12207, P100])
collections = st.sampled_from([paths.pods(), paths.pods(), paths.extendedresources(), paths.nodes(), paths.gpuquotas()])


def step(name, **arguments):
    """A step with arguments to draw."""
    return st.fixed_dictionaries({"do": st.just(name), **arguments})


shares = step(
    "creates", gpu_mem=mems, gpu_core=st.sampled_from([0, 0, 30, 60]), priority=st.sampled_from([0, 0, 10]),
    namespace=namespaces, guarded=st.sampled_from([False, False, True]),
    exclusive=st.sampled_from([False, False, True]),
)  # fmt: skip
on_two_cards = step(
    "creates",
    gpu_mem=st.sampled_from([8138, 16276, 2 * P100]),
    split=st.just(2),
    namespace=namespaces,
    exclusive=st.booleans(),
)
whole_cards = step("creates", whole_gpu=st.integers(1, 2), namespace=namespaces)
of_a_gang = step(
    "creates",
    gpu_mem=st.sampled_from([1000, HALF]),
    gang=st.just("bits"),
    minimum=st.just(2),
    namespace=namespaces,
    exclusive=st.sampled_from([False, False, True]),
)

requests = st.sampled_from(
    [
        {"verb": "create", "path": "*/binding"},
        {"verb": "get", "path": "*/pods/*"},
        {"verb": "patch", "path": "*/pods/*"},
        {"verb": "update", "path": "*/leases/*"},
        {"verb": "list", "path": "*/pods"},
        {"verb": "", "path": "*"},
    ]
)
faults = st.sampled_from(
    [
        {"status": 409},
        {"status": 429, "retry_after": 1},
        {"status": 500},
        {"refused": True},
        {"lost": True},
        {"seconds": 3.0},
        {"seconds": 30.0, "lost": True},
    ]
)
failing = st.builds(
    lambda of, fault, times: {"do": "fails", "times": times, **of, **fault}, requests, faults, st.integers(1, 3)
)
troubles = st.one_of(
    failing,
    step("stands", times=st.integers(1, 2)),
    step("lag", collection=collections),
    step("watches_end", ending=st.sampled_from(["end", "cut", "gone"]), collection=collections),
    step("forget"),
    step("away", seconds=st.sampled_from([0.5, 3.0, 8.0])),
    step("scheduler_restarts"),
    step("binds_again", choice=choice, to=to),
)
of_nodes = st.one_of(
    step("node_comes_or_goes", node=nodes),
    step("node_is_cordoned", node=nodes),
    step(
        "card_changes",
        node=nodes,
        index=st.integers(0, 1),
        change=st.sampled_from(["healthy", "cordoned", "there", "mps"]),
    ),
)
of_extenders = st.one_of(
    step("is_killed", extender=extender),
    step("stops", extender=extender),
    step("stands_still", extender=extender, still=st.booleans()),
    step("is_cut_off", extender=extender, cut=st.booleans()),
    step("is_interrupted", choice=choice, to=to, turns=st.integers(1, 30), kill=st.booleans()),
)


class Extenders(RuleBasedStateMachine):
    """The common part of the machines."""

    build = staticmethod(today)

    def _opens(self, seed, cluster, overrides, hard):
        self.world = World(seed, cluster, quotas={"team": hard}, settings=overrides, classes=CLASSES, build=self.build)
        self.opened = self.world.open()
        self.opened.__enter__()
        self.gangs = 0
        self.world.do("creates")

    def teardown(self):
        if not hasattr(self, "opened"):
            return
        try:
            if self.world.broken is None:
                self.world.do("quiet")
        finally:
            self.opened.__exit__(None, None, None)

    def _do(self, arguments):
        self.world.do(**arguments)

    def _node(self, index):
        """Its name."""
        return sorted(self.world.nodes)[index % len(self.world.nodes)]

    def _calm(self):
        """End all faults and free a card. Returns the leader, to which the scheduler is connected."""
        self.world.do("calm", seconds=5.0)
        if self._largest_free() < LITTLE:
            self.world.do("clears")
            self.world.do("passes", seconds=1.0, stride=0.25)
        return self.world.connected

    def _creates(self, **pod):
        self.world.do("creates", **pod)
        return f"p{self.world.numbers}"

    def _gang(self, mem, size, priority, *, grouped=False):
        """`grouped`: a PodGroup says its size."""
        self.gangs += 1
        gang = f"g{self.gangs}"
        if grouped:
            self.world.do("groups", gang=gang, minimum=size)
        for _ in range(size):
            self.world.do("creates", gpu_mem=mem, gang=gang, minimum=0 if grouped else size, priority=priority)

    def _largest_free(self):
        """The free MiB of the emptiest card."""
        return max(self.world.judge.room(), default=0)

    def _full(self, but=0, **kind):
        """Fill all cards but this number, each with one share. Returns the size of the largest."""
        largest = 0
        while len([free for free in self.world.judge.room() if free >= LITTLE]) > but:
            largest = max(largest, self._largest_free())
            pod = self._creates(gpu_mem=self._largest_free(), **kind)
            before = self.world.judge.room()
            self.world.do("tries", choice=pod, to=0)
            self.world.do("passes", seconds=0.5, stride=0.25)
            if self.world.judge.room() == before:
                break
            self.world.do("runs", choice=pod)
        return largest or P100

    def _two(self):
        """Create pods of which only one fits."""
        self._full(but=1)
        mem = max(self._largest_free(), LITTLE)
        return self._creates(gpu_mem=mem), self._creates(gpu_mem=mem // 2 + 1)

    def _insists(self, pod):
        """Let the scheduler try the pod, and after an error at the other extender, and again at the first."""
        for _ in range(3):
            self.world.do("tries", choice=pod, to=0)
            self.world.do("passes", seconds=0.25, stride=0.25)

    def _unseen(self, fault, pod):
        if fault == "stands":
            self.world.do("stands", times=1)
        else:
            self.world.do("lag", collection=paths.pods())
        self.world.do("tries", choice=pod, to=0)


class Orderly(Extenders):
    """One extender, one step at a time, and no faults: placements do not depend on the order of threads."""

    @initialize(
        seed=st.integers(0, 1 << 16), cluster=st.sampled_from(CLUSTERS), overrides=settings_of_extenders, hard=quotas
    )
    def begin(self, seed, cluster, overrides, hard):
        self._opens(seed, cluster, overrides, hard)

    def _settles(self):
        self.world.do("passes", seconds=2.0, stride=0.25)

    @rule(pod=shares | shares | on_two_cards | whole_cards, kind=kinds)
    def a_pod_comes(self, pod, kind):
        self._do({name: amount for name, amount in pod.items() if amount or name == "do"} | kind)
        self.world.do("tries", choice=f"p{self.world.numbers}", to=0)
        self._settles()

    @rule(mem=st.sampled_from([1000, HALF, HALF + 1]), size=st.integers(2, 3), priority=st.sampled_from([0, 5]))
    def a_gang_comes(self, mem, size, priority):
        self._gang(mem, size, priority)
        self._settles()
        self.the_scheduler_tries_all()

    @rule()
    def the_scheduler_tries_all(self):
        for number in range(1, self.world.numbers + 1):
            self.world.do("tries", choice=f"p{number}", to=0)
        self._settles()

    @rule(choice=choice, action=st.sampled_from(["runs", "runs", "ends", "deletes", "deletes_by_force"]))
    def a_pod_goes_on(self, choice, action):
        self.world.do(action, choice=choice)
        self._settles()

    @rule()
    def deleted_pods_end(self):
        self.world.do("ends_deleted")
        self._settles()

    @rule(change=of_nodes | step("quota_changes", namespace=st.just("team"), hard=quotas))
    def something_changes(self, change):
        if "node" in change:
            change["node"] = self._node(change["node"])
        self._do(change)
        self._settles()

    @rule(seconds=st.sampled_from([10.0, 40.0, 90.0]))
    def much_time_passes(self, seconds):
        self.world.do("passes", seconds=seconds, stride=5.0)


class Machine(Extenders):
    """Rules are single steps, and *scenes*, which lead directly to two pods that could get the same card. A scene
    leaves capacity on one card only, so that a forgotten reservation is given to another pod.
    """

    @initialize(
        seed=st.integers(0, 1 << 16),
        cluster=st.sampled_from(CLUSTERS),
        overrides=settings_of_extenders,
        hard=quotas,
        two=st.booleans(),
    )
    def begin(self, seed, cluster, overrides, hard, two):
        self._opens(seed, cluster, overrides, hard)
        if two:
            self.world.do("starts", extender=1)

    # Single steps.

    @rule(
        pod=shares | shares | on_two_cards | whole_cards | of_a_gang,
        kind=kinds,
        at_once=st.sampled_from([True, True, False]),
    )
    def a_pod_comes(self, pod, kind, at_once):
        self._do({name: amount for name, amount in pod.items() if amount or name == "do"} | kind)
        if at_once:
            self.the_scheduler_tries_all(0)

    @rule(
        mem=st.sampled_from([1000, HALF, HALF + 1]),
        size=st.integers(2, 4),
        priority=st.sampled_from([0, 0, 5]),
        grouped=st.booleans(),
    )
    def a_gang_comes(self, mem, size, priority, grouped):
        self._gang(mem, size, priority, grouped=grouped)
        self.world.do("passes", seconds=1.0, stride=0.25)

    @rule(choice=choice, action=st.sampled_from(["deletes", "deletes", "deletes_by_force", "touches"]))
    def a_pod_is_changed(self, choice, action):
        self.world.do(action, choice=choice)

    @rule(choice=choice, to=to, whole=st.booleans())
    def the_scheduler_tries(self, choice, to, whole):
        self.world.do("tries", choice=choice, to=to, whole=whole)

    @rule(to=to)
    def the_scheduler_tries_all(self, to):
        for choice in range(6):
            self.world.do("tries", choice=choice, to=to)

    @rule()
    def all_goes_its_way(self):
        self.the_scheduler_tries_all(0)
        self.world.do("passes", seconds=1.0, stride=0.25)
        for _ in range(3):
            self.world.do("runs", choice=0)

    @rule(choice=choice, action=st.sampled_from(["runs", "ends"]))
    def the_kubelet_works(self, choice, action):
        self.world.do(action, choice=choice)

    @rule(change=of_nodes | step("quota_changes", namespace=st.just("team"), hard=quotas), back=st.booleans())
    def something_changes(self, change, back):
        if "node" in change:
            change["node"] = self._node(change["node"])
        self._do(change)
        self.all_goes_its_way()
        if back and change["do"] != "quota_changes":
            self._do(change)

    @rule(trouble=troubles)
    def something_goes_wrong(self, trouble):
        self._do(trouble)

    @rule(choice=choice, behind=st.booleans())
    def what_was_late_comes(self, choice, behind):
        self.world.do("arrives", choice=choice, behind=behind)
        self.world.do("catch_up")

    @rule(change=of_extenders)
    def something_happens_to_an_extender(self, change):
        self._do(change)

    @rule()
    def extenders_recover(self):
        for extender in (0, 1):
            self.world.do("starts", extender=extender)
            self.world.do("stands_still", extender=extender, still=False)
            self.world.do("is_cut_off", extender=extender, cut=False)
        self.world.do("passes", seconds=1.0, stride=0.25)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def time_passes(self, seconds):
        self.world.do("passes", seconds=seconds, stride=0.25)

    @rule(seconds=st.sampled_from([10.0, 40.0, 90.0]))
    def much_time_passes(self, seconds):
        self.world.do("passes", seconds=seconds, stride=5.0)

    # Scenes.

    @rule(fault=st.sampled_from(["stands", "lags"]), behind=st.booleans(), back=st.booleans())
    def another_takes_over(self, fault, behind, back):
        """One extender binds a pod and pauses before the watch shows it. The other places a pod that would fit there
        too.
        """
        leader = self._calm()
        self.world.do("starts", extender=1 - leader)
        pod, other = self._two()
        self._unseen(fault, pod)
        self.world.do("stands_still", extender=leader, still=True)
        self.world.do("passes", seconds=10.0, stride=1.0)
        self._insists(other)
        if back:
            self.world.do("stands_still", extender=leader, still=False)
        self.world.do("arrives", choice=-1, behind=behind)
        self.world.do("stands_still", extender=leader, still=False)

    @rule(fault=st.sampled_from(["stands", "lags"]), seconds=st.sampled_from([0.5, 5.0, 30.0]))
    def an_answer_is_late(self, fault, seconds):
        """The same with one extender, which cannot reach the API server for a while."""
        leader = self._calm()
        pod, other = self._two()
        self._unseen(fault, pod)
        self.world.do("is_cut_off", extender=leader, cut=True)
        self.world.do("passes", seconds=4.3, stride=0.25)
        self.world.do("is_cut_off", extender=leader, cut=False)
        self.world.do("passes", seconds=seconds, stride=0.5)
        self._insists(other)
        self.world.do("arrives", choice=-1, behind=False)

    @rule(fault=st.sampled_from(["lost", "stands", ""]), seconds=st.sampled_from([1.5, 3.0, 10.0]))
    def an_answer_is_lost(self, fault, seconds):
        """The outcome of a Binding is unknown, or the watch is late, and another pod arrives."""
        self._calm()
        pod, other = self._two()
        self.world.do("lag", collection=paths.pods())
        if fault == "lost":
            self.world.do("fails", times=1, verb="create", path="*/binding", lost=True)
            self.world.do("fails", times=3, verb="get", path=f"*/pods/{pod}", status=500)
        elif fault == "stands":
            self.world.do("stands", times=1)
        self.world.do("tries", choice=pod, to=0)
        self.world.do("passes", seconds=seconds, stride=0.25)
        self._insists(other)
        self.world.do("arrives", choice=-1, behind=False)
        self.world.do("catch_up")

    @rule(
        action=st.sampled_from(["deletes", "deletes_by_force"]),
        lags=st.booleans(),
        seconds=st.sampled_from([0.0, 2.0, 45.0]),
    )
    def containers_outlive_a_pod(self, action, lags, seconds):
        """The node reports late that they still run."""
        self._calm()
        pod, other = self._two()
        self.world.do("tries", choice=pod, to=0)
        self.world.do("passes", seconds=0.5, stride=0.25)
        self.world.do("runs", choice=pod)
        if lags:
            self.world.do("lag", collection=paths.extendedresources())
        self.world.do(action, choice=pod)
        self.world.do("passes", seconds=seconds, stride=0.5)
        self._insists(other)

    @rule(lags=st.booleans(), whole=st.booleans())
    def a_namespace_asks_for_too_much(self, lags, whole):
        """Each pod alone would be within the quota."""
        self._calm()
        if lags:
            self.world.do("lag", collection=paths.pods())
        share = {"whole_gpu": 1} if whole else {"gpu_mem": 4069}
        for _ in range(4):
            self.world.do("creates", **share, namespace="team")
        for offset in range(4):
            self.world.do("tries", choice=f"p{self.world.numbers - offset}", to=0)
        self.world.do("passes", seconds=0.5, stride=0.25)

    @rule(change=st.sampled_from(["healthy", "cordoned", "mps"]), index=choice)
    def a_card_takes_nothing_new(self, change, index):
        self._calm()
        self.world.do("clears")
        self.world.do("card_changes", node=self._node(index), index=index, change=change)
        self.world.do("passes", seconds=61.0, stride=5.0)
        self._full()
        self.world.do("card_changes", node=self._node(index), index=index, change=change)

    @rule(kinds=st.sampled_from([[{"mps": "none"}, {}], [{}, {"mps": "none"}], [{"resource_class": "fast"}] * 2]))
    def small_ones_of_two_kinds(self, kinds):
        """The pods would fit on one card if every pod could use it."""
        self._calm()
        self.world.do("clears")
        for kind in kinds * 2:
            pod = self._creates(gpu_mem=LITTLE, namespace="team", **kind)
            self.world.do("tries", choice=pod, to=0)
            self.world.do("passes", seconds=0.25, stride=0.25)

    @rule(first=st.booleans(), second=st.booleans(), members=st.integers(0, 2), stops=st.booleans())
    def small_ones_of_two_namespaces(self, first, second, members, stops):
        """The pods would fit on one card if every pod shared it. Some are a gang; the extender may stop meanwhile."""
        leader = self._calm()
        self.world.do("clears")
        for namespace, exclusive in [("default", first), ("team", second)] * 2:
            pod = self._creates(gpu_mem=LITTLE, namespace=namespace, **(EXCLUSIVE if exclusive else {}))
            self.world.do("tries", choice=pod, to=0)
            if stops:
                self.world.do("is_killed", extender=leader)
                self.world.do("starts", extender=leader)
            self.world.do("passes", seconds=0.25, stride=0.25)
        self.gangs += bool(members)
        for _ in range(members):
            self._creates(gpu_mem=LITTLE, gang=f"g{self.gangs}", minimum=members, **EXCLUSIVE)
        self.world.do("passes", seconds=1.0, stride=0.25)
        self.the_scheduler_tries_all(0)
        self.world.do("passes", seconds=1.0, stride=0.25)

    @rule(cores=st.sampled_from([60, 100]), whole=st.booleans())
    def all_but_cores_fit(self, cores, whole):
        """The cores of all cards are used, or one pod holds the whole card."""
        self._calm()
        self.world.do("clears")
        share = {"whole_gpu": 1} if whole else {"gpu_mem": LITTLE, "gpu_core": cores}
        for _ in range(len(self.world.judge.room()) + 1):
            pod = self._creates(**share)
            self.world.do("tries", choice=pod, to=0)
            share = {"gpu_mem": LITTLE, "gpu_core": cores}
        self.world.do("passes", seconds=0.25, stride=0.25)

    @rule(at_once=st.booleans(), seconds=st.sampled_from([0.0, 1.0, 20.0]), guarded=st.booleans())
    def others_go_for_a_pod(self, at_once, seconds, guarded):
        """Before the victims are deleted, or the pod is tried again, a pod of lower priority needs their cards."""
        self._calm()
        low = self._full(guarded=guarded)
        high, third = self._creates(gpu_mem=low, priority=10), self._creates(gpu_mem=low, priority=5)
        self.world.do("tries", choice=high, to=0)
        if not at_once:
            self.world.do("tries", choice=third, to=0)
        self.world.do("passes", seconds=seconds, stride=0.25)
        for _ in range(3):
            self.world.do("ends_deleted")
        self._insists(third)
        self.world.do("goes_first", high=high, low=third)

    @rule(stands=st.booleans(), kill=st.booleans(), turns=st.integers(5, 60))
    def a_gang_is_bound_in_part(self, stands, kill, turns):
        """A gang is bound in part, or not at all, when the extender that binds it stops."""
        leader = self._calm()
        self.world.do("starts", extender=1 - leader)
        self._full(but=1)
        self._gang(max(self._largest_free(), LITTLE) // 2, 2, 0)
        self.world.do("passes", seconds=1.0, stride=0.25)
        if stands:
            self.world.do("stands", times=1)
        for member in range(2):
            self.world.do("is_interrupted", choice=f"p{self.world.numbers - member}", to=0, turns=turns, kill=False)
            self.world.do("stands_still", extender=leader, still=False)
        self.world.do("passes", seconds=0.5, stride=0.1)
        if kill:
            self.world.do("is_killed", extender=leader)
            self.world.do("passes", seconds=10.0, stride=0.5)
        self.world.do("arrives", choice=0, behind=False)

    @rule(extra=st.integers(1, 2), grouped=st.booleans())
    def a_gang_does_not_fit(self, extra, grouped):
        """There is capacity for some members of the gang."""
        self._calm()
        self._full(but=1)
        self._gang(max(self._largest_free(), LITTLE), 1 + extra, 0, grouped=grouped)
        self.world.do("passes", seconds=1.0, stride=0.25)
        for _ in range(2):
            for member in range(1 + extra):
                self.world.do("tries", choice=f"p{self.world.numbers - member}", to=0)
            self.world.do("passes", seconds=1.0, stride=0.25)


@pytest.mark.hypothesis
@pytest.mark.parametrize("part", range(4))  # for as many workers
def test_all_rules_hold(part):
    last, steps = [], []

    class Kept(Machine):
        def teardown(self):
            last[:] = [self.world]
            super().teardown()
            steps.append(len(self.world.history))

    # No shrinking by Hypothesis, which takes minutes: a history is made small by leaving steps out.
    # A history has some 140 steps, so the four parts of a soak have a million.
    run_settings = settings(
        max_examples=examples(8, soak=1900), stateful_step_count=20, deadline=None, phases=[Phase.generate]
    )
    try:
        run_state_machine_as_test(Kept if SOAK else seed(part)(Kept), settings=run_settings)
        print(f"{sum(steps):,} steps in {len(steps):,} histories, and all rules held after each step")
    except BaseException as error:
        if last and last[0].broken is not None:
            replay.write(BROKEN, replay.shrunk(last[0].history))
            error.add_note(f"again: python -m tests.property.replay {BROKEN}")
        raise


def test_a_history_tells_the_same_each_time():
    steps = [
        {"seed": 3, "nodes": NODES, "quotas": {}, "settings": {}},
        {"do": "creates", "gpu_mem": HALF},
        {"do": "creates", "gpu_mem": HALF + 1},
        {"do": "creates", "whole_gpu": 1},
        {"do": "stands", "times": 1},
        *({"do": "tries", "choice": 0, "to": 0} for _ in range(3)),
        {"do": "passes", "seconds": 2.0, "stride": 0.05},
        {"do": "is_killed", "extender": 0},
        {"do": "starts", "extender": 0},
        {"do": "arrives", "choice": 0, "behind": True},
        {"do": "passes", "seconds": 10.0, "stride": 0.5},
        {"do": "quiet"},
    ]
    history = json.loads(json.dumps(steps))
    bindings = blackbox.replay(history)
    assert {binding.pod for binding in bindings} == {"p1", "p2", "p3"}
    assert blackbox.replay(history) == bindings


def test_a_gang_is_placed_despite_many_preempt_calls_for_pods_that_never_fit():
    """Each preempt call takes milliseconds, and the gang's members must reach bind within seconds."""
    history = [
        {"seed": 1, "nodes": {"n1": [P100]}},
        {"do": "creates", "gpu_mem": HALF},
        {"do": "tries", "choice": "p1", "to": 0},
        {"do": "passes", "seconds": 0.5, "stride": 0.25},
        {"do": "runs", "choice": "p1"},
        *(
            {"do": "creates", "gpu_mem": HALF + 1, "gang": f"g{gang}", "minimum": 2, "priority": 5}
            for gang in range(15)
            for _ in range(2)
        ),
        *({"do": "creates", "gpu_mem": LITTLE, "gang": "small", "minimum": 3, "priority": 5} for _ in range(3)),
        {"do": "quiet"},
    ]
    assert {binding.pod for binding in blackbox.replay(history)} == {"p1", "p32", "p33", "p34"}

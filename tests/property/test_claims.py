"""Rules 1, 3, 4 and 5 with scheduler.mode=claims: whole extenders, an unconfigured kube-scheduler, and all faults."""

import pytest
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from cardwise.kube import paths
from tests.build import P100
from tests.examples import SOAK, examples
from tests.property.claimsworld import CLAIMS, ClaimsWorld
from tests.property.test_blackbox import HALF, choice, extender, faults, mems, namespaces, quotas, step

CLUSTERS = [{"n1": [P100, P100], "n2": [HALF]}, {"n1": [P100]}, {"n1": [P100], "n2": [P100]}]
requests = st.sampled_from(
    [
        {"verb": "create", "path": "*/resourceclaims"},
        {"verb": "patch", "path": "*/resourceclaims/*"},
        {"verb": "delete", "path": "*/resourceclaims/*"},
        {"verb": "get", "path": "*/resourceclaims/*"},
        {"verb": "patch", "path": "*/pods/*"},
        {"verb": "get", "path": "*/pods/*"},
        {"verb": "update", "path": "*/leases/*"},
        {"verb": "", "path": "*"},
    ]
)
failing = st.builds(
    lambda of, fault, times: {"do": "fails", "times": times, **of, **fault}, requests, faults, st.integers(1, 3)
)
collections = st.sampled_from([CLAIMS, CLAIMS, paths.pods(), paths.pods(), paths.extendedresources(), paths.nodes()])
nodes = st.sampled_from(["n1", "n1", "n2"])
troubles = st.one_of(
    failing,
    failing,
    step("stands", times=st.integers(1, 2)),
    step("lag", collection=collections),
    step("watches_end", ending=st.sampled_from(["end", "cut", "gone"]), collection=collections),
    step("forget"),
    step("away", seconds=st.sampled_from([0.5, 3.0, 8.0])),
    step("scheduler_restarts"),
)
of_extenders = st.one_of(
    step("is_killed", extender=extender),
    step("stops", extender=extender),
    step("stands_still", extender=extender, still=st.booleans()),
    step("is_cut_off", extender=extender, cut=st.booleans()),
)


class ClaimsMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1 << 16), cluster=st.sampled_from(CLUSTERS), hard=quotas, two=st.booleans())
    def begin(self, seed, cluster, hard, two):
        hard = hard if "class" not in hard else {"shares": 2}
        self.world = ClaimsWorld(seed, cluster, quotas={"team": hard})
        self.opened = self.world.open()
        self.opened.__enter__()
        self.gangs = 0
        if two:
            self.world.do("starts", extender=1)

    def teardown(self):
        if not hasattr(self, "opened"):
            return
        try:
            if self.world.broken is None:
                self.world.do("quiet")
        finally:
            self.opened.__exit__(None, None, None)

    @rule(mem=mems, namespace=namespaces, priority=st.sampled_from([0, 0, 10]), waits=st.sampled_from([0.0, 0.1, 1.0]))
    def a_pod_comes(self, mem, namespace, priority, waits):
        self.world.do("creates", gpu_mem=mem, namespace=namespace, priority=priority)
        self.world.do("passes", seconds=waits, stride=0.02)

    @rule(mem=st.sampled_from([1000, HALF, HALF + 1]), size=st.integers(2, 3))
    def a_gang_comes(self, mem, size):
        self.gangs += 1
        for _ in range(size):
            self.world.do("creates", gpu_mem=mem, gang=f"g{self.gangs}", minimum=size)
        self.world.do("passes", seconds=0.5, stride=0.02)

    @rule(mem=mems, turns=st.integers(1, 60), number=extender, kill=st.booleans())
    def a_leader_ends_between_two_calls(self, mem, turns, number, kill):
        """Pause or kill an extender in the middle of a publication."""
        self.world.do("creates", gpu_mem=mem)
        self.world.do("is_struck", turns=turns, extender=number, kill=kill)

    @rule()
    def the_scheduler_works(self):
        for number in range(8):
            self.world.do("tries", choice=number, to=0)
        self.world.do("passes", seconds=0.5, stride=0.1)

    @rule(node=nodes, times=st.integers(1, 3), deallocates=st.booleans())
    def the_scheduler_refuses(self, node, times, deallocates):
        self.world.do("refuses", node=node, times=times, deallocates=deallocates)
        self.the_scheduler_works()

    @rule(choice=choice, action=st.sampled_from(["runs", "runs", "ends", "deletes", "deletes_by_force", "touches"]))
    def a_pod_goes_on(self, choice, action):
        self.world.do(action, choice=choice)

    @rule(choice=choice)
    def a_claim_is_deleted_by_force(self, choice):
        self.world.do("loses_its_claim", choice=choice)

    @rule(node=st.sampled_from(["n1", "n1"]), change=st.sampled_from(["healthy", "cordoned"]))
    def a_card_changes(self, node, change):
        self.world.do("card_changes", node=node, index=0, change=change)

    @rule(trouble=troubles)
    def something_goes_wrong(self, trouble):
        self.world.do(**trouble)

    @rule(trouble=of_extenders)
    def an_extender_has_trouble(self, trouble):
        self.world.do(**trouble)

    @rule(number=extender)
    def an_extender_starts(self, number):
        self.world.do("starts", extender=number)
        self.world.do("passes", seconds=2.0, stride=0.1)

    @rule(number=choice, behind=st.booleans())
    def a_late_write_arrives(self, number, behind):
        self.world.do("arrives", choice=number, behind=behind)
        self.the_scheduler_works()

    @rule(seconds=st.sampled_from([0.3, 2.0, 8.0, 40.0]))
    def time_passes(self, seconds):
        self.world.do("passes", seconds=seconds, stride=0.1 if seconds < 5 else 0.5)


def run(number: int, count: int, steps: int) -> None:
    phases = [Phase.explicit, Phase.generate] + [Phase.shrink] * SOAK
    chosen = settings(max_examples=count, stateful_step_count=steps, deadline=None, phases=phases)
    run_state_machine_as_test(seed(number)(ClaimsMachine), settings=chosen)


@pytest.mark.parametrize("number", range(2))
def test_rules_hold_with_claims(number):
    run(number, examples(8, soak=2000), 25)

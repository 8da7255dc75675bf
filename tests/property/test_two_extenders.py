"""Rules 1 and 5 with several extenders: leases are lost, calls stand still at any point, watches lag.

A post is carried out at once, or not at all, or when its term is long over: process, network or an API server stood
still after the last question, and the policy of that API server may be behind, so that it knows no newer term. One that
lands late in its own term is in test_extender_state.py.
"""

import contextlib
import itertools
import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cardwise.core.api import assignment, names, request
from cardwise.kube import errors, paths
from extender.cache.reservations import Begun, Phase
from extender.records.podref import PodRef
from tests.examples import examples
from tests.extender.leaders import DURATION, Cluster, Extender
from tests.extender.worlds import P100
from tests.fakes.apiserver import Fault
from tests.fakes.clock import FakeClock

CARDS = {"n1": 2}
PODS = 4
QUOTA = 1  # shares of the namespace "default"

whose = st.integers(0, 1)
pods = st.integers(0, PODS - 1).map("p{}".format)
outcomes = st.sampled_from(["heard", "unheard", "lost", "late", "late"])


class Machine(RuleBasedStateMachine):
    @initialize(mems=st.lists(st.sampled_from([P100 // 2, P100 // 2 + 1, P100]), min_size=PODS, max_size=PODS))
    def begin(self, mems):
        self.clock = FakeClock()
        self.api = Cluster(self.clock)
        for i, mem in enumerate(mems):
            self.api.create_pod(f"p{i}", mem, namespace="default" if i % 2 else "team")
        self.numbers = itertools.count()
        self.extenders = [self._start(), self._start()]
        self.standing = []  # calls between the decision and the post: extender, pod, what was decided, term
        self.sent = []  # posts that have not arrived: extender, path, body, term
        for each in self.extenders * 2:
            each.look()

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0]))
    def all_is_well(self, seconds):
        self.clock.advance(seconds)
        for each in self.extenders:
            each.look()
            each.look_up()

    @rule(which=whose, seconds=st.sampled_from([0.0, 4.0, DURATION]))
    def one_only_renews(self, which, seconds):
        """Its term does not begin yet; the other does nothing."""
        self.clock.advance(seconds)
        self.extenders[which].elector.step()

    @rule(which=whose)
    def one_stands_still_until_the_other_has_taken_over(self, which):
        for _ in range(4):
            self.clock.advance(DURATION / 2)
            self.extenders[which].look()

    @rule(which=whose, seconds=st.sampled_from([DURATION, 80.0]))
    def nobody_can_renew_and_one_is_the_first_that_can(self, which, seconds):
        """Pods can be read meanwhile, and nobody can write: as when etcd is full."""
        full = [self.api.fault(Fault(status=500), verb, times=math.inf) for verb in ("update", "patch")]
        self.clock.advance(seconds)
        for each in self.extenders:
            each.look()
            each.look_up()
        for fault in full:
            fault.end()
        for _ in range(3):
            self.extenders[which].look()

    @rule(which=whose, cut=st.booleans())
    def one_is_cut_off(self, which, cut):
        self.extenders[which].cut = cut

    @rule(which=whose, count=st.integers(1, 4))
    def the_watch_tells(self, which, count):
        for _ in range(count):
            self.extenders[which].hear()

    def _answering(self):
        return next((each for each in self.extenders if each.leadership.denial() is None), None)

    @rule(pod=pods)
    def filter_is_asked(self, pod):
        extender = self._answering()
        if extender is not None:
            extender.filter(pod, "n1")

    @rule(pod=pods, outcome=outcomes | st.none())
    def bind_is_asked(self, pod, outcome):
        """The call stands still once it has decided, with the pod as filter or a look has shown it; or it goes on."""
        extender = self._answering()
        if extender is None:
            return
        made, term = self.api.pods()[pod], extender.leadership.term()
        who = (made["metadata"]["namespace"], pod)
        begun = extender.state.begin_bind(PodRef(f"uid-{pod}", *who), request.parse(made), "n1", "binpack", term=term)
        if isinstance(begun, Begun):
            path, version = paths.pods(*who, "binding"), made["metadata"]["resourceVersion"]
            self.standing.append((extender, path, begun, term, version))
            if outcome is not None:
                self._go_on(len(self.standing) - 1, outcome)

    @rule(data=st.data(), outcome=outcomes)
    def a_call_goes_on(self, data, outcome):
        if self.standing:
            self._go_on(data.draw(st.integers(0, len(self.standing) - 1)), outcome)

    @rule(which=whose)
    def one_is_told_to_end_and_another_comes(self, which):
        """Its posts have ended, as far as it knows."""
        old = self.extenders[which]
        if not old.cut:
            old.elector.stop()
            old.elector.leave()
            self.extenders[which] = self._start()

    def _start(self):
        name = f"extender-{next(self.numbers)}"
        return Extender(self.api, name, self.clock, cards=CARDS, quota={"shares": QUOTA})

    def _go_on(self, at, outcome):
        extender, path, begun, term, version = self.standing.pop(at)
        stage = Phase.UNCONFIRMED if begun.unsure else None
        annotations = assignment.encode(begun.assignment, assume_time_ns=1)
        annotations[names.TERM] = extender.leadership.word(term)
        body = {"metadata": {"annotations": annotations, "resourceVersion": version}, "target": {"name": "n1"}}
        with contextlib.suppress(errors.Conflict, errors.Unreachable), extender.leadership.posting(term) as left:
            if left > 0 and outcome in ("lost", "late"):
                stage = Phase.UNCONFIRMED
                if outcome == "late":
                    self.sent.append((extender, path, body, term))
                raise errors.Unreachable("nobody knows what becomes of it")
            if left > 0 and not extender.cut:
                extender.client.request("POST", path, body=body)
                stage = Phase.ASSUMED if outcome == "heard" else Phase.UNCONFIRMED
                if outcome == "unheard":
                    raise errors.Unreachable("it was carried out")
        extender.state.finish_bind(f"uid-{path.split('/')[-2]}", stage)

    @rule(data=st.data())
    def a_call_looks_again(self, data):
        """Its Binding was refused, since somebody has changed the pod."""
        if self.standing:
            at = data.draw(st.integers(0, len(self.standing) - 1))
            extender, path, begun, term, _ = self.standing[at]
            if not extender.cut:
                labels = {"changed": str(self.clock.wall_ns())}
                made = self.api.edit(path.removesuffix("/binding"), metadata={"labels": labels})
                self.standing[at] = (extender, path, begun, term, made["metadata"]["resourceVersion"])

    @rule(data=st.data(), behind=st.booleans())
    def what_was_late_arrives(self, data, behind):
        over = self._over()
        if over:
            self._arrive(data.draw(st.sampled_from(over)), behind)

    @rule(first=pods, second=pods, behind=st.booleans())
    def an_api_server_stands_still(self, first, second, behind):
        """With a Binding in its buffers, until the next leader has given cards away by another."""
        leader = self._answering()
        if leader is None:
            return
        self.bind_is_asked(first, "late")
        self.one_stands_still_until_the_other_has_taken_over(1 - self.extenders.index(leader))
        self.bind_is_asked(second, "heard")
        for sent in self._over():
            self._arrive(sent, behind)

    @rule(first=pods, second=pods, behind=st.booleans())
    def an_api_server_stands_still_while_nobody_can_renew(self, first, second, behind):
        """With a Binding in its buffers, until the same leader has given cards away once more."""
        leader = self._answering()
        if leader is None:
            return
        self.bind_is_asked(first, "late")
        self.nobody_can_renew_and_one_is_the_first_that_can(self.extenders.index(leader), 80.0)
        leader.look_up()
        self.bind_is_asked(second, "heard")
        for sent in self._over():
            self._arrive(sent, behind)

    def _over(self):
        """What is late and of a term that is over."""
        return [each for each in self.sent if each[0].leadership.term() != each[3]]

    def _arrive(self, sent, behind):
        _, path, body, _ = sent
        self.sent.remove(sent)
        self.api.behind = behind
        with contextlib.suppress(errors.Conflict, errors.Invalid):
            self.api.client().request("POST", path, body=body)
        self.api.behind = False

    @invariant()
    def no_card_and_no_quota_is_given_twice(self):
        if not hasattr(self, "api"):
            return
        assert self.api.over_full(P100) == []
        limited = [name for name in self.api.given() if self.api.pods()[name]["metadata"]["namespace"] == "default"]
        assert len(limited) <= QUOTA

    @invariant()
    def at_most_one_may_post(self):
        if not hasattr(self, "api"):
            return
        terms = [(each, each.leadership.term()) for each in self.extenders]
        leading = [each for each, term in terms if term is not None]
        assert len(leading) <= 1


TestTwoExtenders = Machine.TestCase
TestTwoExtenders.settings = settings(max_examples=examples(80, soak=2000), stateful_step_count=60, deadline=None)

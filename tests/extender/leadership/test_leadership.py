"""Several extenders: one serves calls, and whichever is paused or disconnected, no card and no
quota is reserved twice.
"""

import itertools
import math
import threading

import pytest

from cardwise.core.api import assignment, names, request
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.placement.cardindex import CardIndex
from cardwise.kube import errors, paths
from extender.binding.binder import BindFailed
from extender.cache.reservations import Phase
from extender.leadership.fence import PodState
from extender.leadership.leadership import Leadership
from extender.records.podref import PodRef
from tests.build import P100, asking, binding, pod
from tests.extender.leaders import LEASE, Cluster, Extender
from tests.extender.states import as_pod, bound, mark
from tests.fakes.apiserver import Fault
from tests.fakes.clock import FakeClock


class ExtenderPair:
    """a leads, b stands by."""

    def __init__(self, **settings) -> None:
        self.clock = FakeClock()
        self.api = Cluster(self.clock)
        cards = settings.pop("cards", {"n1": 1})
        self.a, self.b = (Extender(self.api, name, self.clock, cards=cards, **settings) for name in "ab")
        for extender in (self.a, self.a, self.b, self.b):
            extender.exchange_lease()
        assert self.a.leadership.epoch() is not None
        assert self.b.leadership.epoch() is None

    def takes_over(self, heir: Extender) -> None:
        """Let the Lease expire, and this extender take it."""
        for _ in range(12):
            self.clock.advance(2.0)
            heir.exchange_lease()
        assert heir.leadership.epoch() is not None


@pytest.fixture
def pair():
    return ExtenderPair()


def fails(extender, name, node="n1"):
    with pytest.raises(BindFailed) as failed:
        extender.bind(name, node)
    return failed.value.outcome


def test_a_standby_names_the_leader_and_refuses_calls(pair):
    assert pair.a.leadership.denial() is None
    denial = pair.b.leadership.denial()
    assert denial.served_elsewhere
    assert denial.text == "not the leader: a holds the lease ns/l"
    assert pair.b.leadership.summary() == denial.text
    assert pair.a.leadership.summary() == "leader: this extender holds the lease ns/l"
    pair.api.create_pod("p", 100)
    assert fails(pair.b, "p") == "standby"
    assert pair.a.bind("p", "n1") == "bound"


def test_a_beginning_that_fails_after_all_was_settled_settles_nothing_again(pair, monkeypatch):
    reads = []
    pair.b.reads = lambda: reads.append(1) or True

    def broken():
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(pair.b.state.gangs, "plan_partly_bound_gangs", broken)
        for _ in range(12):
            pair.clock.advance(2.0)
            pair.b.elector.step()
        for _ in range(3):
            with pytest.raises(RuntimeError):
                pair.b.leadership.step()
    assert pair.b.leadership.epoch() is None
    pair.b.leadership.step()
    assert pair.b.leadership.epoch() is not None
    assert len(reads) == 1


def test_before_a_leader_is_known_none_is_named(clock):
    extender = Extender(Cluster(clock), "a", clock, cards={"n1": 1})
    assert "another extender or none holds" in extender.leadership.denial().text
    extender.elector.step()
    assert "no extender holds" in extender.leadership.denial().text


def test_a_leader_that_cannot_renew_logs_it_and_stops_in_time(pair):
    pair.api.create_pod("p", 100)
    pair.a.cut = True
    pair.clock.advance(13.4)
    pair.a.exchange_lease()
    assert pair.a.leadership.epoch() is not None
    pair.clock.advance(0.2)
    pair.a.exchange_lease()
    assert pair.a.leadership.epoch() is None
    assert "or is over" in pair.a.leadership.denial().text


def test_an_extender_without_state_releases_the_lease(pair):
    with pair.a.state.view():  # somebody stands there
        for _ in range(12):
            pair.clock.advance(2.0)
            if pair.a.leadership.epoch() is not None:
                pair.a.elector.step()
            pair.b.exchange_lease()
        assert pair.a.leadership.epoch() is None
        assert pair.b.leadership.epoch() is not None
    pair.a.exchange_lease()
    assert pair.a.leadership.epoch() is None


def test_a_long_turn_does_not_cost_the_lease(pair):
    with pair.a.state.view():
        for _ in range(3):
            pair.clock.advance(2.0)
            pair.a.elector.step()
    pair.a.exchange_lease()
    pair.clock.advance(12.0)
    assert pair.a.leadership.epoch() is not None


def test_nothing_is_posted_that_may_last_longer_than_the_lease(pair):
    epoch = pair.a.leadership.epoch()
    with pair.a.leadership.allow_post(epoch) as seconds_left:
        assert 12.0 < seconds_left <= 12.5  # of 15 s: a tenth for clocks, and a second for the answer
    pair.clock.advance(12.0)
    with pair.a.leadership.allow_post(epoch) as seconds_left:
        assert 0 < seconds_left <= 0.5
    pair.clock.advance(0.6)
    with pair.a.leadership.allow_post(epoch) as seconds_left:
        assert seconds_left == 0
    assert pair.a.leadership.epoch() == epoch, "it still answers, what it must not is write"


def test_a_post_may_take_as_long_as_the_lease_and_no_longer(pair):
    pair.api.create_pod("p", 100)
    pair.clock.advance(10.0)
    pair.a.bind("p", "n1")
    (post,) = pair.api.sent("create", "*/binding")
    assert post.timeout == pytest.approx(2.5, abs=0.1)


@pytest.mark.parametrize("again", [False, True])
def test_an_extender_paused_before_its_post_does_not_post_after_another_led(pair, again):
    """A pause of the whole process, as a garbage collector makes it. `again`: it has the Lease again by then."""
    pair.api.create_pod("mine", P100)
    pair.api.create_pod("other", P100)
    begin_bind = pair.a.state.assume

    def paused(*args, **kwargs):
        begun = begin_bind(*args, **kwargs)
        pair.takes_over(pair.b)
        assert pair.b.bind("other", "n1") == "bound"
        if again:
            pair.takes_over(pair.a)
        return begun

    pair.a.state.assume = paused
    assert fails(pair.a, "mine") == "standby"
    assert pair.api.posts() == [("b", "other")]
    assert mark(pair.a.state, "uid-mine") is None
    pair.a.state.assume = begin_bind
    assert fails(pair.a, "mine") == ("refused" if again else "standby")


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_post_that_stood_still_on_its_way_is_refused_by_the_api_server(pair, again, behind):
    """The pause comes after the last check and before the first byte, so the process cannot notice it.

    behind: whether the admission policy of that API server lags as well.
    """
    pair.api.behind = behind
    pair.api.create_pod("mine", P100)
    pair.api.create_pod("other", P100)

    def late(_):
        pair.takes_over(pair.b)
        assert pair.b.bind("other", "n1") == "bound"
        if again:
            pair.takes_over(pair.a)

    pair.api.before_request(late, "create", "*/mine/binding")
    assert fails(pair.a, "mine") == ("standby" if behind else "api_error")
    assert pair.api.over_full(P100) == []
    assert list(pair.api.bound_assignments()) == ["other"]
    assert mark(pair.a.state, "uid-mine") is None


def test_two_extenders_do_not_grant_the_last_share_of_a_quota_twice():
    pair = ExtenderPair(cards={"n1": 2}, quota={"shares": 1})
    pair.api.create_pod("mine", 100)
    pair.api.create_pod("other", 100)
    assert pair.a.filter("mine", "n1").node == "n1"
    pair.takes_over(pair.b)
    assert pair.b.bind("other", "n1") == "bound"
    assert fails(pair.a, "mine") == "standby"
    pair.takes_over(pair.a)
    assert fails(pair.a, "mine") == "refused"
    assert [name for _, name in pair.api.posts()] == ["other"]


def test_before_it_knows_what_the_other_has_bound_a_new_leader_answers_nothing(pair):
    pair.api.create_pod("p", P100)
    pair.api.create_pod("q", P100)
    pair.a.bind("p", "n1")
    pair.b.reads = lambda: False
    for _ in range(9):
        pair.clock.advance(2.0)
        pair.b.exchange_lease()
    denial = pair.b.leadership.denial()
    assert (denial.served_elsewhere, "still listing" in denial.text) == (False, True)
    assert fails(pair.b, "q") == "standby"
    pair.b.reads = lambda: True
    pair.b.exchange_lease()
    assert pair.b.leadership.denial() is None
    assert fails(pair.b, "q") == "refused"


def test_what_lands_while_an_epoch_begins_is_known_before_it_gives_anything_away(pair):
    pair.api.behind = True
    pair.api.create_pod("mine", P100)
    pair.api.create_pod("other", P100)
    late = binding_of(pair.api, "mine")

    def lands(_):
        pair.api.client().create(paths.pods("default", "mine", "binding"), late)

    pair.api.before_request(lands, "patch", "*/mine/status")
    pair.takes_over(pair.b)
    assert list(pair.api.bound_assignments()) == ["mine"]
    assert fails(pair.b, "other") == "refused"


def test_what_the_first_call_of_an_epoch_would_wait_for_is_made_before_it_begins(monkeypatch):
    pair = ExtenderPair(cards={f"n{i}": 1 for i in range(40)})  # more nodes than one decision indexes
    epochs = []
    refresh = CardIndex.refresh

    def refreshed(index, nodes):
        epochs.append(pair.b.leadership.epoch())
        refresh(index, nodes)

    gives_back(pair.a)
    monkeypatch.setattr(CardIndex, "refresh", refreshed)
    takes(pair.b)
    assert epochs == [None]


def test_an_epoch_does_not_begin_while_waiting_pods_cannot_be_changed(pair):
    pair.api.create_pod("p", P100)
    down = pair.api.fault(Fault(status=503), "patch", "*/p/status", times=math.inf)
    elector, still = pair.b.elector, pair.b.elector.holds_lease
    elector.holds_lease = lambda margin=0.0, epoch=None: still(margin, epoch) and not len(pair.api.sent("patch")) > 2
    for _ in range(9):
        pair.clock.advance(2.0)
        pair.b.exchange_lease()
    assert pair.b.leadership.epoch() is None
    assert len(pair.api.sent("patch")) == 3
    elector.holds_lease = still
    down.end()
    pair.b.exchange_lease()
    assert pair.b.leadership.epoch() is not None


def test_a_pod_that_cannot_be_changed_does_not_delay_an_epoch(pair):
    """Another webhook or policy refuses the change: every tenant may have pods that violate its rules."""
    pair.api.create_pod("p", P100)
    pair.api.create_pod("q", P100)
    pair.api.fault(Fault(status=403), "patch", "*/p/status", times=math.inf)
    pair.takes_over(pair.b)
    assert pair.b.bind("q", "n1") == "bound"


def test_a_pod_is_changed_each_time_also_by_the_same_word(pair):
    """A write that changes nothing is none: a Binding from before it could land."""
    pair.api.create_pod("p", P100)
    seen = [pair.api.pods()["p"]]
    for _ in range(2):
        pair.clock.advance(1.0)
        assert pair.a.leadership._fence.fence_pod(PodRef("uid-p", "default", "p"), "word") is PodState.UNBOUND
        seen.append(pair.api.pods()["p"])
    assert len({pod["metadata"]["resourceVersion"] for pod in seen}) == 3


def test_what_cannot_be_changed_is_not_settled_for_the_next_one(pair):
    pair.api.create_pod("p", P100)
    pair.api.create_pod("q", P100)
    refused = pair.api.fault(Fault(status=422), "patch", "*/p/status", times=math.inf)
    pair.takes_over(pair.b)
    refused.end()
    gives_back(pair.b)
    takes(pair.a)
    # The pods of an epoch are patched at the same time, in any order.
    assert [sorted(changed(pair)[:2]), sorted(changed(pair)[2:])] == [["p", "q"], ["p", "q"]]


def test_what_could_not_be_changed_is_tried_again_while_the_epoch_lasts(pair):
    """Until it is changed, or waits no more, a Binding of a former epoch may land."""
    for name in ("p", "q", "r"):
        pair.api.create_pod(name, 100)
    refused = [pair.api.fault(Fault(status=403), "patch", f"*/{name}/status", times=math.inf) for name in "pq"]
    pair.takes_over(pair.b)
    assert sorted(changed(pair)) == ["p", "q", "r"]
    pair.b.exchange_lease()
    assert len(changed(pair)) == 3, "not at once"
    refused[0].end()
    later(pair)
    assert changed(pair).count("p") == 2
    assert changed(pair).count("r") == 1
    assert not pair.b.leadership.is_settled()
    assert pair.b.bind("q", "n1") == "bound"
    pair.b.catch_up(lambda: True)
    before = changed(pair)
    later(pair)
    assert changed(pair) == before, "nothing of a former epoch can land any more"
    assert pair.b.leadership.is_settled()


def later(pair):
    """Let the leader renew its Lease for a minute."""
    for _ in range(30):
        pair.clock.advance(2.0)
        pair.b.exchange_lease()


def test_pods_that_others_bind_during_fencing_do_not_delay_an_epoch(pair):
    """A tenant's steady stream: one more pod at each list, which another scheduler binds before it can be changed."""
    numbers, lists = itertools.count(), itertools.count(1)

    def comes():
        assert next(lists) < 9
        pair.api.create_pod(f"p{next(numbers)}", 100)
        return True

    def is_bound(call):
        body = binding(annotations={names.LEADER_EPOCH: "x/x/x/99"})
        pair.api.client().create(call.path.replace("/status", "/binding"), body)

    pair.b.reads = comes
    pair.api.before_request(is_bound, "patch", "*/status", times=math.inf)
    pair.takes_over(pair.b)
    assert next(lists) == 2, "nothing of ours has landed, so one list is enough"


@pytest.mark.parametrize("again", [False, True], ids=["", "and-another-is-tried-again"])
def test_our_pods_that_are_bound_during_fencing_do_not_delay_an_epoch(pair, again):
    numbers = itertools.count()
    pair.api.behind = True
    if again:
        pair.api.create_pod("other", 1)
        pair.api.fault(Fault(status=503), "patch", "*/other/status")

    def comes():
        pair.api.create_pod(f"p{next(numbers)}", 100)
        return True

    def lands(call):
        assigned = Assignment({"main": (CardShare(0, "GPU-n1-0", 100, 0, P100),)})
        annotations = assignment.encode(assigned, assume_time_ns=1)
        body = binding(annotations=annotations)
        pair.api.client().create(call.path.replace("/status", "/binding"), body)

    pair.b.reads = comes
    pair.api.before_request(lands, "patch", "*/pods/p*/status", times=math.inf)
    pair.takes_over(pair.b)
    assert next(numbers) == 2
    assert mark(pair.b.state, "uid-p0") == ""


@pytest.mark.parametrize("fault", [Fault(status=503), Fault(status=409)], ids=str)
def test_many_that_cannot_be_changed_keep_an_epoch_waiting_no_longer_than_one(pair, fault):
    for i in range(20):  # more than are changed at once
        pair.api.create_pod(f"p{i}", 1)
    pair.api.create_pod("good", 1)
    pair.api.fault(fault, "patch", "*/pods/p*/status", times=math.inf)
    began = pair.clock.now()
    swept = pair.b.leadership._fence.fence_pods(
        [PodRef(f"uid-{name}", "default", name) for name in pair.api.pods()], "word", lambda: True
    )
    assert pair.clock.now() - began <= 12
    assert swept == (False, frozenset(f"uid-p{i}" for i in range(20)))
    assert changed(pair).count("good") == 1


def test_a_namespace_of_pods_that_are_slow_to_change_keeps_an_epoch_waiting_no_longer_than_a_few_of_them(pair):
    """A tenant can make each take seconds: kube-apiserver reads all of `metadata.managedFields` at each write."""
    pods = [PodRef(f"uid-p{i}", "fat", f"p{i}") for i in range(300)] + [PodRef("uid-good", "default", "good")]
    for ref in pods:
        pair.api.create_pod(ref.name, 1, namespace=ref.namespace)
    pair.api.before_request(lambda _call: pair.clock.advance(2.0), "patch", "*/pods/p*/status", times=math.inf)
    pair.api.fault(Fault(refused=True), "patch", "*/pods/p*/status", times=math.inf)
    swept = pair.b.leadership._fence.fence_pods(pods, "word", lambda: True)
    assert swept == (False, frozenset(ref.uid for ref in pods if ref.namespace == "fat"))
    assert len(changed(pair)) <= 16 * 3 + 1, "each of them takes two seconds"
    assert changed(pair).count("good") == 1


def fat(pair, namespaces, per_namespace):
    """Pods of one tenant whose writes all time out, and a pod of another tenant."""
    pods = [PodRef(f"uid-p{n}-{i}", f"fat{n}", f"p{n}-{i}") for n in range(namespaces) for i in range(per_namespace)]
    for ref in (*pods, good := PodRef("uid-good", "default", "good")):
        pair.api.create_pod(ref.name, 1, namespace=ref.namespace)
    lock, tried = threading.Lock(), []

    def slowly(call):
        with lock:  # sixteen writes at a time, so each takes a sixteenth of the time
            tried.append(call.timeout)
            pair.clock.advance(call.timeout / 16)

    pair.api.before_request(slowly, "patch", "*/pods/p*/status", times=math.inf)
    pair.api.fault(Fault(refused=True), "patch", "*/pods/p*/status", times=math.inf)
    return [*pods, good], tried


@pytest.mark.parametrize(("namespaces", "per_namespace"), [(1, 300), (40, 40), (300, 2)])
def test_a_tenants_fat_pods_keep_an_epoch_waiting_no_longer_than_the_patience_for_all(pair, namespaces, per_namespace):
    pods, _ = fat(pair, namespaces, per_namespace)
    began = pair.clock.now()
    swept = pair.b.leadership._fence.fence_pods(pods, "word", lambda: True)
    assert swept == (False, frozenset(pod.uid for pod in pods) - {"uid-good"})
    assert changed(pair).count("good") == 1
    assert pair.clock.now() - began <= 10 + 300 * 0.25 / 16 + 1


def test_a_tenants_fat_pods_are_tried_again_a_few_at_a_time_while_the_epoch_lasts(pair):
    _, tried = fat(pair, 1, 300)
    pair.takes_over(pair.b)
    assert pair.b.bind("good", "n1") == "bound"
    before = len(tried)
    later(pair)
    # Of the 300 in a minute; some of the first sweep may still have been on their way.
    assert 16 < len(tried) - before <= 4 * 16


def test_taking_the_own_lease_again_fences_only_unconfirmed_pods(pair):
    for name in ("p", "q"):
        pair.api.create_pod(name, 100)
    sends_in_vain(pair.a, "q")
    loses_and_takes_again(pair, pair.a)
    assert changed(pair) == ["q"]
    assert mark(pair.a.state, "uid-q") == "unconfirmed", "what is void is given up by who looks it up"


def test_taking_the_lease_again_after_another_leader_fences_all_pods(pair):
    pair.api.create_pod("p", 100)
    pair.takes_over(pair.b)
    pair.takes_over(pair.a)
    assert changed(pair) == ["p", "p"]


def test_a_lease_whose_count_goes_back_hides_no_other_leader(pair):
    """A backup that is restored, or an edit, gives a leader the token that it had before another one led."""
    pair.takes_over(pair.b)
    count = pair.api.get(LEASE)["spec"]["leaseTransitions"]
    for name in ("mine", "other"):
        pair.api.create_pod(name, P100)
    pair.takes_over(pair.a)
    pair.b.exchange_lease()
    late = binding_of(pair.api, "mine")
    late["metadata"]["annotations"][names.LEADER_EPOCH] = pair.a.leadership.fencing_token(pair.a.leadership.epoch())
    count_is(pair, count - 1)
    pair.takes_over(pair.b)
    assert pair.b.bind("other", "n1") == "bound"
    with pytest.raises(errors.KubeError):
        pair.api.client().create(paths.pods("default", "mine", "binding"), late)
    assert pair.api.over_full(P100) == []


def test_when_the_count_of_holders_is_at_its_limit_each_new_leader_changes_all(pair):
    count_is(pair, 2**31 - 1)
    pair.api.create_pod("p", 100)
    for leader in (pair.b, pair.a, pair.b, pair.a):
        pair.takes_over(leader)
    assert changed(pair) == ["p"] * 4


def test_what_one_said_when_it_ended_is_no_news_of_a_lease_whose_count_went_back(pair):
    gives_back(pair.a)
    count = pair.api.get(LEASE)["spec"]["leaseTransitions"]
    takes(pair.b)
    pair.api.create_pod("p", 100)
    count_is(pair, count)
    pair.takes_over(Extender(pair.api, "c", pair.clock, cards={"n1": 1}))
    assert changed(pair) == ["p"]


def test_what_it_could_not_change_stays_unsettled_when_it_takes_its_own_lease_again(pair):
    for name in ("p", "q"):
        pair.api.create_pod(name, 100)
    refused = pair.api.fault(Fault(status=422), "patch", "*/p/status", times=math.inf)
    pair.takes_over(pair.b)
    pair.b.cut = True
    pair.clock.advance(14.0)
    pair.b.exchange_lease()
    assert pair.b.leadership.epoch() is None
    pair.b.cut = False
    takes(pair.b)
    assert sorted(changed(pair)) == ["p", "q"], "nobody else has led"
    assert not pair.b.leadership.is_settled()
    refused.end()
    gives_back(pair.b)
    takes(pair.a)
    assert sorted(changed(pair)) == ["p", "p", "q", "q"]


def cannot_renew(pair):
    """For example, etcd is full: pods can be read, but the Lease cannot be renewed for longer than
    a response may take.
    """
    full = pair.api.fault(Fault(status=500), "update", LEASE, times=math.inf)
    for _ in range(4):
        pair.clock.advance(20.0)
        pair.a.exchange_lease()
    assert pair.a.leadership.epoch() is None
    pair.a.look_up()
    full.end()
    takes(pair.a)


def hears_of_no_lease(pair):
    """A response says that the Lease does not exist; later it exists again."""
    gone = [pair.api.fault(Fault(status=404), verb, LEASE, times=math.inf) for verb in ("get", "update")]
    pair.clock.advance(80.0)
    pair.a.exchange_lease()
    assert pair.a.elector.token is None
    pair.a.look_up()
    for post in gone:
        post.end()
    pair.takes_over(pair.a)


@pytest.mark.parametrize("happens", [cannot_renew, hears_of_no_lease])
def test_unconfirmed_bindings_stay_unconfirmed_while_it_does_not_lead_or_the_leader_is_unknown(pair, happens):
    for name in ("mine", "other"):
        pair.api.create_pod(name, P100)
    late = binding_of(pair.api, "mine")
    sends_in_vain(pair.a, "mine")
    happens(pair)
    pair.a.look_up()
    assert pair.a.bind("other", "n1") == "bound"
    with pytest.raises(errors.Conflict):
        pair.api.client().create(paths.pods("default", "mine", "binding"), late)
    assert list(pair.api.bound_assignments()) == ["other"]


def test_what_it_has_not_heard_of_it_gives_up_once_another_leads(pair):
    """It counts like a standby: reservations of the other leader are not counted twice."""
    pair.api.create_pod("mine", P100)
    sends_in_vain(pair.a, "mine")
    pair.takes_over(pair.b)
    pair.clock.advance(80.0)
    pair.a.look_up()
    assert mark(pair.a.state, "uid-mine") == "unconfirmed", "it does not know yet that another has led"
    for _ in range(2):
        pair.a.exchange_lease()
    pair.a.look_up()
    assert mark(pair.a.state, "uid-mine") is None
    pair.takes_over(pair.a)
    assert changed(pair) == ["mine", "mine"]


def count_is(pair, count):
    """Write this count into the Lease."""
    pair.api.edit(LEASE, spec=pair.api.get(LEASE)["spec"] | {"leaseTransitions": count})


def binding_of(api, name):
    """The Binding of the pod's current version to the whole first card, as it would be posted."""
    assigned = Assignment({"main": (CardShare(0, "GPU-n1-0", P100, 0, P100),)})
    annotations = assignment.encode(assigned, assume_time_ns=1) | {names.LEADER_EPOCH: "x/x/x/99"}
    version = api.pods()[name]["metadata"]["resourceVersion"]
    return binding(name, resourceVersion=version, annotations=annotations)


def loses_and_takes_again(pair, extender):
    """Let the extender lose its Lease and take it again, without another leader in between."""
    extender.cut = True
    pair.clock.advance(14.0)
    extender.exchange_lease()
    assert extender.leadership.epoch() is None
    extender.cut = False
    takes(extender)


def sends_in_vain(extender, name):
    """Send a Binding whose outcome stays unknown."""
    pod_request = request.parse(extender.api.pods()[name])
    epoch = extender.leadership.epoch()
    extender.state.assume(PodRef(f"uid-{name}", "default", name), pod_request, "n1", "binpack", epoch=epoch)
    extender.state.record_binding_outcome(f"uid-{name}", Phase.UNCONFIRMED)


def changed(pair):
    return [call.path.split("/")[-2] for call in pair.api.sent("patch")]


def test_an_epoch_changes_every_waiting_pod_once(pair):
    for i in range(40):
        pair.api.create_pod(f"p{i}", 100)
    gated = asking("gated", gpu_mem=100)
    gated["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    pair.api.write_object(paths.pods(), gated)
    for name, label in (("by-name", "cardwise.dev/x"), ("member", names.GANG)):
        plain = pod(name, uid=f"uid-{name}")
        plain["metadata"]["labels"] = {label: "y"}
        pair.api.write_object(paths.pods(), plain)
    pair.a.bind("p0", "n1")
    pair.takes_over(pair.b)
    assert sorted(changed(pair)) == sorted(["member", *(f"p{i}" for i in range(1, 40))])
    assert pair.api.pods()["p1"]["metadata"]["annotations"][names.LEADER_EPOCH].startswith("ns/l/")


@pytest.mark.parametrize("between", ["nobody", "another"])
def test_an_epoch_that_did_not_begin_in_time_continues_unless_another_extender_led(pair, between):
    names_of = [f"p{i}" for i in range(40)]
    for name in names_of:
        pair.api.create_pod(name, 100)
    elector, holds = pair.b.elector, pair.b.elector.holds_lease
    elector.holds_lease = lambda margin=0.0, epoch=None: holds(margin, epoch) and len(pair.api.sent("patch")) < 20
    for _ in range(9):
        pair.clock.advance(2.0)
        pair.b.exchange_lease()
    assert pair.b.leadership.epoch() is None
    first = changed(pair)
    assert 20 <= len(first) < 40
    elector.holds_lease = holds
    pair.b.cut = True
    pair.clock.advance(14.0)
    pair.b.exchange_lease()
    pair.b.cut = False
    if between == "another":
        pair.takes_over(pair.a)
    before = len(changed(pair))
    pair.takes_over(pair.b)
    again = changed(pair)[before:]
    assert sorted(again) == sorted(names_of if between == "another" else set(names_of) - set(first))


def gives_back(extender):
    """Release the Lease as at shutdown: by the elector's thread, after all posts have ended."""
    extender.elector.stop()
    extender.elector.release()


def takes(extender):
    """Take a Lease that was released."""
    for _ in range(3):
        extender.exchange_lease()
    assert extender.leadership.epoch() is not None


def test_after_a_clean_shutdown_the_next_leader_fences_no_pod(pair):
    pair.api.create_pod("p", 100)
    pair.api.create_pod("q", 100)
    assert pair.a.bind("q", "n1") == "bound"
    gives_back(pair.a)
    takes(pair.b)
    assert pair.api.sent("patch") == []


@pytest.mark.parametrize("fault", [Fault(status=500), Fault(lost=True), Fault(refused=True)], ids=str)
def test_who_takes_over_from_one_that_missed_an_answer_and_got_it_at_last_changes_nothing(pair, fault):
    pair.api.create_pod("p", 100)
    pair.api.create_pod("q", 100)
    pair.api.fault(fault, "create", "*/q/binding")
    assert pair.a.bind("q", "n1") == "bound"  # in the end
    gives_back(pair.a)
    takes(pair.b)
    assert changed(pair) == []


@pytest.mark.parametrize("seen", [False, True])
def test_who_takes_over_from_one_that_missed_an_answer_changes_the_pods_unless_it_was_seen_bound(pair, seen):
    pair.api.create_pod("p", 100)
    pair.api.create_pod("q", 100)
    sends_in_vain(pair.a, "q")
    if seen:
        bound_ = bound("q", 100, 0)
        pair.a.state.set_pod(as_pod(bound_))
    gives_back(pair.a)
    takes(pair.b)
    assert sorted(changed(pair)) == ([] if seen else ["p", "q"])


def test_who_has_taken_over_so_and_takes_its_own_lease_again_changes_what_it_has_not_heard_of(pair):
    """A clean shutdown of the former leader says nothing about its own Bindings."""
    gives_back(pair.a)
    takes(pair.b)
    for name in ("p", "q"):
        pair.api.create_pod(name, 100)
    sends_in_vain(pair.b, "q")
    loses_and_takes_again(pair, pair.b)
    assert changed(pair) == ["q"]


def test_a_member_without_cards_of_which_nobody_has_heard_is_not_settled_until_it_is_seen_bound(pair):
    pair.a.state.assume(PodRef("uid-m", "default", "m"), None, "n1", "binpack", epoch=0)
    pair.a.state.record_binding_outcome("uid-m", Phase.UNCONFIRMED)
    assert not pair.a.leadership.is_settled()
    member = pod("m", uid="uid-m")
    member["metadata"]["labels"] = {names.GANG: "g"}
    pair.a.state.set_pod(as_pod(member))
    assert not pair.a.leadership.is_settled()
    member["spec"]["nodeName"] = "n1"
    pair.a.state.set_pod(as_pod(member))
    assert pair.a.leadership.is_settled()


def test_while_one_looks_what_became_of_a_member_without_cards_it_does_not_say_that_all_was_answered(pair):
    pair.api.write_object(paths.pods(), pod("m", uid="uid-m"))
    pair.api.fault(Fault(refused=True), "create", "*/m/binding")
    settled = []
    pair.api.before_request(lambda _: settled.append(pair.a.leadership.is_settled()), "get", "*/m", times=math.inf)
    assert pair.a.bind("m", "n1") == "bound"
    assert settled == [True, False]
    assert pair.a.leadership.is_settled()


def test_while_one_posts_it_does_not_say_that_all_was_answered(pair):
    """This holds for every way in which the Lease was released before the response."""
    pair.api.create_pod("p", 100)
    with pair.a.leadership.allow_post(pair.a.leadership.epoch()):
        gives_back(pair.a)
    takes(pair.b)
    assert len(pair.api.sent("patch")) == 1


def test_a_post_counts_before_its_epoch_is_checked(pair, monkeypatch):
    """The epoch may end right after that check, and the Binding is sent nevertheless."""
    epoch, holds, settled = pair.a.leadership.epoch(), pair.a.elector.holds_lease, []

    def check(*args, **settings):
        settled.append(pair.a.leadership.is_settled())
        return holds(*args, **settings)

    monkeypatch.setattr(pair.a.elector, "holds_lease", check)
    with pair.a.leadership.allow_post(epoch) as seconds_left:
        assert seconds_left > 0
    assert settled == [False]


def test_what_one_says_when_it_ends_is_good_for_the_next_alone(pair):
    pair.api.create_pod("p", 100)
    gives_back(pair.a)
    takes(pair.b)
    assert pair.api.sent("patch") == []
    other = Extender(pair.api, "c", pair.clock, cards={"n1": 1})
    pair.takes_over(other)  # from b, which was killed
    assert len(pair.api.sent("patch")) == 1


@pytest.mark.parametrize("has_seen_leader", [False, True])
def test_a_settled_release_that_a_backup_brings_back_says_nothing(pair, has_seen_leader):
    """Another extender has led since, and a Binding of its epoch is in progress."""
    gives_back(pair.a)
    backup = pair.api.get(LEASE)
    assert backup["metadata"]["annotations"][names.FENCED]
    takes(pair.b)
    for name in ("mine", "other"):
        pair.api.create_pod(name, P100)
    pair.takes_over(Extender(pair.api, "d", pair.clock, cards={"n1": 1}))
    late = binding_of(pair.api, "mine")
    c = Extender(pair.api, "c", pair.clock, cards={"n1": 1})
    if has_seen_leader:
        c.exchange_lease()
    pair.api.edit(LEASE, spec=backup["spec"], metadata={"annotations": backup["metadata"]["annotations"]})
    for _ in range(3):
        c.exchange_lease()
    assert c.leadership.epoch() is None
    pair.takes_over(c)
    assert c.bind("other", "n1") == "bound"
    with pytest.raises(errors.Conflict):
        pair.api.client().create(paths.pods("default", "mine", "binding"), late)
    assert pair.api.over_full(P100) == []


def test_one_whose_epoch_never_began_says_nothing_of_those_before(pair):
    pair.api.create_pod("p", 100)
    pair.b.reads = lambda: False
    with pytest.raises(AssertionError):
        pair.takes_over(pair.b)
    assert pair.api.holder() == "b"
    gives_back(pair.b)
    takes(pair.a)
    assert len(pair.api.sent("patch")) == 1


def test_an_epoch_that_ended_while_it_caught_up_does_not_begin(pair):
    def slow():
        pair.clock.advance(20)
        return True

    pair.b.reads = slow
    for _ in range(9):
        pair.clock.advance(2.0)
        pair.b.elector.step()
    pair.b.leadership.step()
    assert pair.b.leadership.epoch() is None


def test_plans_of_an_earlier_epoch_are_gone_in_the_next(pair):
    pair.api.create_pod("p", P100)
    pair.a.filter("p", "n1")
    assert mark(pair.a.state, "uid-p") == "reserved"
    pair.a.cut = True
    pair.clock.advance(14)
    pair.a.exchange_lease()
    assert mark(pair.a.state, "uid-p") is None
    pair.a.filter("p", "n1")  # by a call that was under way
    pair.a.cut = False
    pair.takes_over(pair.a)
    assert mark(pair.a.state, "uid-p") is None


def test_a_new_leader_wakes_the_pods_that_the_other_had_refused(pair):
    pair.b.state.next_requeue_node()
    pair.takes_over(pair.b)
    assert pair.b.state.next_requeue_node() == "n1"


def test_the_lease_is_given_back_only_after_the_writes_under_way(pair):
    epoch_ended = threading.Event()
    pair.a.state.forget_plans = epoch_ended.set  # what the elector's thread does first when the epoch is over
    pair.a.elector.start()
    stopping = threading.Thread(target=pair.a.leadership.stop)
    with pair.a.leadership.allow_post(pair.a.leadership.epoch()):
        stopping.start()
        assert epoch_ended.wait(60)
        pair.clock.until_waiting()
        assert pair.a.leadership.epoch() is None
        assert pair.api.holder() == "a"
    assert pair.clock.join(stopping, 60)
    assert pair.api.holder() == ""


def test_alone_there_is_nothing_to_wait_for():
    alone = Leadership()
    assert alone.denial() is None
    assert alone.is_uninterrupted()
    with alone.allow_post(alone.epoch()) as seconds_left:
        assert seconds_left > 1e9


def test_a_member_without_cards_that_lands_while_an_epoch_begins_is_known_before_it_begins(pair):
    """Its Binding assigns no card, so it leaves no annotation of ours."""
    pair.api.create_pod("m", 100)
    pair.api.edit(paths.pods("default", "m"), metadata={"labels": {names.GANG: "g"}})
    lists = []
    pair.b.reads = lambda: lists.append(1) or True

    def lands(call):
        body = binding(annotations={names.LEADER_EPOCH: "x/x/x/99"})
        pair.api.client().create(call.path.replace("/status", "/binding"), body)

    pair.api.before_request(lands, "patch", "*/status")
    pair.takes_over(pair.b)
    assert len(lists) == 2

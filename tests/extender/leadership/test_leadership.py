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
from tests.build import pod
from tests.extender.leaders import LEASE, Cluster, Extender
from tests.extender.worlds import P100, as_pod, asking, bound, mark
from tests.fakes.apiserver import Fault
from tests.fakes.clock import FakeClock


class Two:
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
def two():
    return Two()


def fails(extender, name, node="n1"):
    with pytest.raises(BindFailed) as failed:
        extender.bind(name, node)
    return failed.value.outcome


def test_a_standby_names_the_leader_and_refuses_calls(two):
    assert two.a.leadership.denial() is None
    denial = two.b.leadership.denial()
    assert denial.served_elsewhere
    assert denial.text == "not the leader: a holds the lease ns/l"
    assert two.b.leadership.summary() == denial.text
    assert two.a.leadership.summary() == "leader: this extender holds the lease ns/l"
    two.api.create_pod("p", 100)
    assert fails(two.b, "p") == "standby"
    assert two.a.bind("p", "n1") == "bound"


def test_a_beginning_that_fails_after_all_was_settled_settles_nothing_again(two, monkeypatch):
    reads = []
    two.b.reads = lambda: reads.append(1) or True

    def broken():
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(two.b.state.gangs, "recover", broken)
        for _ in range(12):
            two.clock.advance(2.0)
            two.b.elector.step()
        for _ in range(3):
            with pytest.raises(RuntimeError):
                two.b.leadership.step()
    assert two.b.leadership.epoch() is None
    two.b.leadership.step()
    assert two.b.leadership.epoch() is not None
    assert len(reads) == 1


def test_before_a_leader_is_known_none_is_named():
    clock = FakeClock()
    extender = Extender(Cluster(clock), "a", clock, cards={"n1": 1})
    assert "another extender or none holds" in extender.leadership.denial().text
    extender.elector.step()
    assert "no extender holds" in extender.leadership.denial().text


def test_a_leader_that_cannot_renew_logs_it_and_stops_in_time(two):
    two.api.create_pod("p", 100)
    two.a.cut = True
    two.clock.advance(13.4)
    two.a.exchange_lease()
    assert two.a.leadership.epoch() is not None
    two.clock.advance(0.2)
    two.a.exchange_lease()
    assert two.a.leadership.epoch() is None
    assert "not any more" in two.a.leadership.denial().text


def test_an_extender_without_state_releases_the_lease(two):
    with two.a.state.view():  # somebody stands there
        for _ in range(12):
            two.clock.advance(2.0)
            if two.a.leadership.epoch() is not None:
                two.a.elector.step()
            two.b.exchange_lease()
        assert two.a.leadership.epoch() is None
        assert two.b.leadership.epoch() is not None
    two.a.exchange_lease()
    assert two.a.leadership.epoch() is None


def test_a_long_turn_does_not_cost_the_lease(two):
    with two.a.state.view():
        for _ in range(3):
            two.clock.advance(2.0)
            two.a.elector.step()
    two.a.exchange_lease()
    two.clock.advance(12.0)
    assert two.a.leadership.epoch() is not None


def test_nothing_is_posted_that_may_last_longer_than_the_lease(two):
    epoch = two.a.leadership.epoch()
    with two.a.leadership.allow_post(epoch) as seconds_left:
        assert 12.0 < seconds_left <= 12.5  # of 15 s: a tenth for clocks, and a second for the answer
    two.clock.advance(12.0)
    with two.a.leadership.allow_post(epoch) as seconds_left:
        assert 0 < seconds_left <= 0.5
    two.clock.advance(0.6)
    with two.a.leadership.allow_post(epoch) as seconds_left:
        assert seconds_left == 0
    assert two.a.leadership.epoch() == epoch, "it still answers, what it must not is write"


def test_a_post_may_take_as_long_as_the_lease_and_no_longer(two):
    two.api.create_pod("p", 100)
    two.clock.advance(10.0)
    two.a.bind("p", "n1")
    (post,) = two.api.sent("create", "*/binding")
    assert post.timeout == pytest.approx(2.5, abs=0.1)


@pytest.mark.parametrize("again", [False, True])
def test_an_extender_paused_before_its_post_does_not_post_after_another_led(two, again):
    """A pause of the whole process, as a garbage collector makes it. `again`: it has the Lease again by then."""
    two.api.create_pod("mine", P100)
    two.api.create_pod("other", P100)
    begin_bind = two.a.state.assume

    def paused(*args, **kwargs):
        begun = begin_bind(*args, **kwargs)
        two.takes_over(two.b)
        assert two.b.bind("other", "n1") == "bound"
        if again:
            two.takes_over(two.a)
        return begun

    two.a.state.assume = paused
    assert fails(two.a, "mine") == "standby"
    assert two.api.posts() == [("b", "other")]
    assert mark(two.a.state, "uid-mine") is None
    two.a.state.assume = begin_bind
    assert fails(two.a, "mine") == ("refused" if again else "standby")


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_post_that_stood_still_on_its_way_is_refused_by_the_api_server(two, again, behind):
    """The pause comes after the last check and before the first byte, so the process cannot notice it.

    behind: whether the admission policy of that API server lags as well.
    """
    two.api.behind = behind
    two.api.create_pod("mine", P100)
    two.api.create_pod("other", P100)

    def late(_):
        two.takes_over(two.b)
        assert two.b.bind("other", "n1") == "bound"
        if again:
            two.takes_over(two.a)

    two.api.before_request(late, "create", "*/mine/binding")
    assert fails(two.a, "mine") == ("standby" if behind else "api_error")
    assert two.api.over_full(P100) == []
    assert list(two.api.bound_assignments()) == ["other"]
    assert mark(two.a.state, "uid-mine") is None


def test_two_extenders_do_not_grant_the_last_share_of_a_quota_twice():
    two = Two(cards={"n1": 2}, quota={"shares": 1})
    two.api.create_pod("mine", 100)
    two.api.create_pod("other", 100)
    assert two.a.filter("mine", "n1").node == "n1"
    two.takes_over(two.b)
    assert two.b.bind("other", "n1") == "bound"
    assert fails(two.a, "mine") == "standby"
    two.takes_over(two.a)
    assert fails(two.a, "mine") == "refused"
    assert [name for _, name in two.api.posts()] == ["other"]


def test_before_it_knows_what_the_other_has_bound_a_new_leader_answers_nothing(two):
    two.api.create_pod("p", P100)
    two.api.create_pod("q", P100)
    two.a.bind("p", "n1")
    two.b.reads = lambda: False
    for _ in range(9):
        two.clock.advance(2.0)
        two.b.exchange_lease()
    denial = two.b.leadership.denial()
    assert (denial.served_elsewhere, "still listing" in denial.text) == (False, True)
    assert fails(two.b, "q") == "standby"
    two.b.reads = lambda: True
    two.b.exchange_lease()
    assert two.b.leadership.denial() is None
    assert fails(two.b, "q") == "refused"


def test_what_lands_while_an_epoch_begins_is_known_before_it_gives_anything_away(two):
    two.api.behind = True
    two.api.create_pod("mine", P100)
    two.api.create_pod("other", P100)
    late = binding_of(two.api, "mine")

    def lands(_):
        two.api.client().create(paths.pods("default", "mine", "binding"), late)

    two.api.before_request(lands, "patch", "*/mine/status")
    two.takes_over(two.b)
    assert list(two.api.bound_assignments()) == ["mine"]
    assert fails(two.b, "other") == "refused"


def test_what_the_first_call_of_an_epoch_would_wait_for_is_made_before_it_begins(two, monkeypatch):
    epochs = []
    refresh = CardIndex.refresh

    def refreshed(index, nodes):
        epochs.append(two.b.leadership.epoch())
        refresh(index, nodes)

    gives_back(two.a)
    monkeypatch.setattr(CardIndex, "refresh", refreshed)
    takes(two.b)
    assert epochs == [None]


def test_an_epoch_does_not_begin_while_waiting_pods_cannot_be_changed(two):
    two.api.create_pod("p", P100)
    down = two.api.fault(Fault(status=503), "patch", "*/p/status", times=math.inf)
    elector, still = two.b.elector, two.b.elector.holds_lease
    elector.holds_lease = lambda margin=0.0, epoch=None: still(margin, epoch) and not len(two.api.sent("patch")) > 2
    for _ in range(9):
        two.clock.advance(2.0)
        two.b.exchange_lease()
    assert two.b.leadership.epoch() is None
    assert len(two.api.sent("patch")) == 3
    elector.holds_lease = still
    down.end()
    two.b.exchange_lease()
    assert two.b.leadership.epoch() is not None


def test_a_pod_that_cannot_be_changed_does_not_delay_an_epoch(two):
    """Another webhook or policy refuses the change: every tenant may have pods that violate its rules."""
    two.api.create_pod("p", P100)
    two.api.create_pod("q", P100)
    two.api.fault(Fault(status=403), "patch", "*/p/status", times=math.inf)
    two.takes_over(two.b)
    assert two.b.bind("q", "n1") == "bound"


def test_a_pod_is_changed_each_time_also_by_the_same_word(two):
    """A write that changes nothing is none: a Binding from before it could land."""
    two.api.create_pod("p", P100)
    seen = [two.api.pods()["p"]]
    for _ in range(2):
        two.clock.advance(1.0)
        assert two.a.leadership._fence.fence_pod(PodRef("uid-p", "default", "p"), "word") is PodState.UNBOUND
        seen.append(two.api.pods()["p"])
    assert len({pod["metadata"]["resourceVersion"] for pod in seen}) == 3


def test_what_cannot_be_changed_is_not_settled_for_the_next_one(two):
    two.api.create_pod("p", P100)
    two.api.create_pod("q", P100)
    refused = two.api.fault(Fault(status=422), "patch", "*/p/status", times=math.inf)
    two.takes_over(two.b)
    refused.end()
    gives_back(two.b)
    takes(two.a)
    assert changed(two) == ["p", "q", "p", "q"]


def test_what_could_not_be_changed_is_tried_again_while_the_epoch_lasts(two):
    """Until it is changed, or waits no more, a Binding of a former epoch may land."""
    for name in ("p", "q", "r"):
        two.api.create_pod(name, 100)
    refused = [two.api.fault(Fault(status=403), "patch", f"*/{name}/status", times=math.inf) for name in "pq"]
    two.takes_over(two.b)
    assert sorted(changed(two)) == ["p", "q", "r"]
    two.b.exchange_lease()
    assert len(changed(two)) == 3, "not at once"
    refused[0].end()
    later(two)
    assert changed(two).count("p") == 2
    assert changed(two).count("r") == 1
    assert not two.b.leadership.is_settled()
    assert two.b.bind("q", "n1") == "bound"
    two.b.catch_up(lambda: True)
    before = changed(two)
    later(two)
    assert changed(two) == before, "nothing of a former epoch can land any more"
    assert two.b.leadership.is_settled()


def later(two):
    """Let the leader renew its Lease for a minute."""
    for _ in range(30):
        two.clock.advance(2.0)
        two.b.exchange_lease()


def test_pods_that_others_bind_during_fencing_do_not_delay_an_epoch(two):
    """A tenant's steady stream: one more pod at each list, which another scheduler binds before it can be changed."""
    numbers, lists = itertools.count(), itertools.count(1)

    def comes():
        assert next(lists) < 9
        two.api.create_pod(f"p{next(numbers)}", 100)
        return True

    def is_bound(call):
        body = {"metadata": {"annotations": {names.LEADER_EPOCH: "x/x/x/99"}}, "target": {"name": "n1"}}
        two.api.client().create(call.path.replace("/status", "/binding"), body)

    two.b.reads = comes
    two.api.before_request(is_bound, "patch", "*/status", times=math.inf)
    two.takes_over(two.b)
    assert next(lists) == 2, "nothing of ours has landed, so one list is enough"


@pytest.mark.parametrize("again", [False, True], ids=["", "and-another-is-tried-again"])
def test_our_pods_that_are_bound_during_fencing_do_not_delay_an_epoch(two, again):
    numbers = itertools.count()
    two.api.behind = True
    if again:
        two.api.create_pod("other", 1)
        two.api.fault(Fault(status=503), "patch", "*/other/status")

    def comes():
        two.api.create_pod(f"p{next(numbers)}", 100)
        return True

    def lands(call):
        assigned = Assignment({"main": (CardShare(0, "GPU-n1-0", 100, 0, P100),)})
        annotations = assignment.encode(assigned, assume_time_ns=1)
        body = {"metadata": {"annotations": annotations}, "target": {"name": "n1"}}
        two.api.client().create(call.path.replace("/status", "/binding"), body)

    two.b.reads = comes
    two.api.before_request(lands, "patch", "*/pods/p*/status", times=math.inf)
    two.takes_over(two.b)
    assert next(numbers) == 2
    assert mark(two.b.state, "uid-p0") == ""


@pytest.mark.parametrize("fault", [Fault(status=503), Fault(status=409)], ids=str)
def test_many_that_cannot_be_changed_keep_an_epoch_waiting_no_longer_than_one(two, fault):
    for i in range(20):  # more than are changed at once
        two.api.create_pod(f"p{i}", 1)
    two.api.create_pod("good", 1)
    two.api.fault(fault, "patch", "*/pods/p*/status", times=math.inf)
    began = two.clock.now()
    swept = two.b.leadership._fence.fence_pods(
        [PodRef(f"uid-{name}", "default", name) for name in two.api.pods()], "word", lambda: True
    )
    assert two.clock.now() - began <= 12
    assert swept == (False, frozenset(f"uid-p{i}" for i in range(20)))
    assert changed(two).count("good") == 1


def test_a_namespace_of_pods_that_are_slow_to_change_keeps_an_epoch_waiting_no_longer_than_a_few_of_them(two):
    """A tenant can make each take seconds: kube-apiserver reads all of `metadata.managedFields` at each write."""
    pods = [PodRef(f"uid-p{i}", "fat", f"p{i}") for i in range(300)] + [PodRef("uid-good", "default", "good")]
    for ref in pods:
        two.api.create_pod(ref.name, 1, namespace=ref.namespace)
    two.api.before_request(lambda _call: two.clock.advance(2.0), "patch", "*/pods/p*/status", times=math.inf)
    two.api.fault(Fault(refused=True), "patch", "*/pods/p*/status", times=math.inf)
    swept = two.b.leadership._fence.fence_pods(pods, "word", lambda: True)
    assert swept == (False, frozenset(ref.uid for ref in pods if ref.namespace == "fat"))
    assert len(changed(two)) <= 16 * 3 + 1, "each of them takes two seconds"
    assert changed(two).count("good") == 1


def fat(two, namespaces, per_namespace):
    """Pods of one tenant whose writes all time out, and a pod of another tenant."""
    pods = [PodRef(f"uid-p{n}-{i}", f"fat{n}", f"p{n}-{i}") for n in range(namespaces) for i in range(per_namespace)]
    for ref in (*pods, good := PodRef("uid-good", "default", "good")):
        two.api.create_pod(ref.name, 1, namespace=ref.namespace)
    lock, tried = threading.Lock(), []

    def slowly(call):
        with lock:  # sixteen writes at a time, so each takes a sixteenth of the time
            tried.append(call.timeout)
            two.clock.advance(call.timeout / 16)

    two.api.before_request(slowly, "patch", "*/pods/p*/status", times=math.inf)
    two.api.fault(Fault(refused=True), "patch", "*/pods/p*/status", times=math.inf)
    return [*pods, good], tried


@pytest.mark.parametrize(("namespaces", "per_namespace"), [(1, 300), (40, 40), (300, 2)])
def test_a_tenants_fat_pods_keep_an_epoch_waiting_no_longer_than_the_patience_for_all(two, namespaces, per_namespace):
    pods, _ = fat(two, namespaces, per_namespace)
    began = two.clock.now()
    swept = two.b.leadership._fence.fence_pods(pods, "word", lambda: True)
    assert swept == (False, frozenset(pod.uid for pod in pods) - {"uid-good"})
    assert changed(two).count("good") == 1
    assert two.clock.now() - began <= 10 + 300 * 0.25 / 16 + 1


def test_a_tenants_fat_pods_are_tried_again_a_few_at_a_time_while_the_epoch_lasts(two):
    _, tried = fat(two, 1, 300)
    two.takes_over(two.b)
    assert two.b.bind("good", "n1") == "bound"
    before = len(tried)
    later(two)
    # Of the 300 in a minute; some of the first sweep may still have been on their way.
    assert 16 < len(tried) - before <= 4 * 16


def test_taking_the_own_lease_again_fences_only_unconfirmed_pods(two):
    for name in ("p", "q"):
        two.api.create_pod(name, 100)
    sends_in_vain(two.a, "q")
    loses_and_takes_again(two, two.a)
    assert changed(two) == ["q"]
    assert mark(two.a.state, "uid-q") == "unconfirmed", "what is void is given up by who looks it up"


def test_taking_the_lease_again_after_another_leader_fences_all_pods(two):
    two.api.create_pod("p", 100)
    two.takes_over(two.b)
    two.takes_over(two.a)
    assert changed(two) == ["p", "p"]


def test_a_lease_whose_count_goes_back_hides_no_other_leader(two):
    """A backup that is restored, or an edit, gives a leader the token that it had before another one led."""
    two.takes_over(two.b)
    count = two.api.get(LEASE)["spec"]["leaseTransitions"]
    for name in ("mine", "other"):
        two.api.create_pod(name, P100)
    two.takes_over(two.a)
    two.b.exchange_lease()
    late = binding_of(two.api, "mine")
    late["metadata"]["annotations"][names.LEADER_EPOCH] = two.a.leadership.fencing_token(two.a.leadership.epoch())
    count_is(two, count - 1)
    two.takes_over(two.b)
    assert two.b.bind("other", "n1") == "bound"
    with pytest.raises(errors.KubeError):
        two.api.client().create(paths.pods("default", "mine", "binding"), late)
    assert two.api.over_full(P100) == []


def test_when_the_count_of_holders_is_at_its_limit_each_new_leader_changes_all(two):
    count_is(two, 2**31 - 1)
    two.api.create_pod("p", 100)
    for leader in (two.b, two.a, two.b, two.a):
        two.takes_over(leader)
    assert changed(two) == ["p"] * 4


def test_what_one_said_when_it_ended_is_no_news_of_a_lease_whose_count_went_back(two):
    gives_back(two.a)
    count = two.api.get(LEASE)["spec"]["leaseTransitions"]
    takes(two.b)
    two.api.create_pod("p", 100)
    count_is(two, count)
    two.takes_over(Extender(two.api, "c", two.clock, cards={"n1": 1}))
    assert changed(two) == ["p"]


def test_what_it_could_not_change_stays_unsettled_when_it_takes_its_own_lease_again(two):
    for name in ("p", "q"):
        two.api.create_pod(name, 100)
    refused = two.api.fault(Fault(status=422), "patch", "*/p/status", times=math.inf)
    two.takes_over(two.b)
    two.b.cut = True
    two.clock.advance(14.0)
    two.b.exchange_lease()
    assert two.b.leadership.epoch() is None
    two.b.cut = False
    takes(two.b)
    assert sorted(changed(two)) == ["p", "q"], "nobody else has led"
    assert not two.b.leadership.is_settled()
    refused.end()
    gives_back(two.b)
    takes(two.a)
    assert sorted(changed(two)) == ["p", "p", "q", "q"]


def test_unconfirmed_bindings_stay_unconfirmed_while_it_does_not_lead(two):
    """For example, etcd is full: pods can be read, but the Lease cannot be renewed for longer than
    a response may take.
    """
    for name in ("mine", "other"):
        two.api.create_pod(name, P100)
    late = binding_of(two.api, "mine")
    sends_in_vain(two.a, "mine")
    full = two.api.fault(Fault(status=500), "update", LEASE, times=math.inf)
    for _ in range(4):
        two.clock.advance(20.0)
        two.a.exchange_lease()
    assert two.a.leadership.epoch() is None
    two.a.look_up()
    full.end()
    takes(two.a)
    two.a.look_up()
    assert two.a.bind("other", "n1") == "bound"
    with pytest.raises(errors.Conflict):
        two.api.client().create(paths.pods("default", "mine", "binding"), late)
    assert list(two.api.bound_assignments()) == ["other"]


def test_unconfirmed_bindings_stay_unconfirmed_while_the_leader_is_unknown(two):
    """A response says that the Lease does not exist; later it exists again."""
    for name in ("mine", "other"):
        two.api.create_pod(name, P100)
    late = binding_of(two.api, "mine")
    sends_in_vain(two.a, "mine")
    gone = [two.api.fault(Fault(status=404), verb, LEASE, times=math.inf) for verb in ("get", "update")]
    two.clock.advance(80.0)
    two.a.exchange_lease()
    assert two.a.elector.token == ""
    two.a.look_up()
    for post in gone:
        post.end()
    two.takes_over(two.a)
    two.a.look_up()
    assert two.a.bind("other", "n1") == "bound"
    with pytest.raises(errors.Conflict):
        two.api.client().create(paths.pods("default", "mine", "binding"), late)
    assert list(two.api.bound_assignments()) == ["other"]


def test_what_it_has_not_heard_of_it_gives_up_once_another_leads(two):
    """It counts like a standby: reservations of the other leader are not counted twice."""
    two.api.create_pod("mine", P100)
    sends_in_vain(two.a, "mine")
    two.takes_over(two.b)
    two.clock.advance(80.0)
    two.a.look_up()
    assert mark(two.a.state, "uid-mine") == "unconfirmed", "it does not know yet that another has led"
    for _ in range(2):
        two.a.exchange_lease()
    two.a.look_up()
    assert mark(two.a.state, "uid-mine") is None
    two.takes_over(two.a)
    assert changed(two) == ["mine", "mine"]


def count_is(two, count):
    """Write this count into the Lease."""
    two.api.edit(LEASE, spec=two.api.get(LEASE)["spec"] | {"leaseTransitions": count})


def binding_of(api, name):
    """The Binding of the pod's current version to the whole first card, as it would be posted."""
    assigned = Assignment({"main": (CardShare(0, "GPU-n1-0", P100, 0, P100),)})
    annotations = assignment.encode(assigned, assume_time_ns=1) | {names.LEADER_EPOCH: "x/x/x/99"}
    version = api.pods()[name]["metadata"]["resourceVersion"]
    return {"metadata": {"resourceVersion": version, "annotations": annotations}, "target": {"name": "n1"}}


def loses_and_takes_again(two, extender):
    """Let the extender lose its Lease and take it again, without another leader in between."""
    extender.cut = True
    two.clock.advance(14.0)
    extender.exchange_lease()
    assert extender.leadership.epoch() is None
    extender.cut = False
    takes(extender)


def sends_in_vain(extender, name):
    """Send a Binding whose outcome stays unknown."""
    pod_request = request.parse(extender.api.pods()[name])
    epoch = extender.leadership.epoch()
    extender.state.assume(PodRef(f"uid-{name}", "default", name), pod_request, "n1", "binpack", epoch=epoch)
    extender.state.confirm(f"uid-{name}", Phase.UNCONFIRMED)


def changed(two):
    return [call.path.split("/")[-2] for call in two.api.sent("patch")]


def test_an_epoch_changes_every_waiting_pod_once(two):
    for i in range(40):
        two.api.create_pod(f"p{i}", 100)
    gated = asking("gated", gpu_mem=100)
    gated["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    two.api.write_object(paths.pods(), gated)
    for name, label in (("by-name", "cardwise.dev/x"), ("member", names.GANG)):
        plain = pod(name, uid=f"uid-{name}")
        plain["metadata"]["labels"] = {label: "y"}
        two.api.write_object(paths.pods(), plain)
    two.a.bind("p0", "n1")
    two.takes_over(two.b)
    assert sorted(changed(two)) == sorted(["member", *(f"p{i}" for i in range(1, 40))])
    assert two.api.pods()["p1"]["metadata"]["annotations"][names.LEADER_EPOCH].startswith("ns/l/")


@pytest.mark.parametrize("between", ["nobody", "another"])
def test_an_epoch_that_did_not_begin_in_time_continues_unless_another_extender_led(two, between):
    names_of = [f"p{i}" for i in range(40)]
    for name in names_of:
        two.api.create_pod(name, 100)
    elector, holds = two.b.elector, two.b.elector.holds_lease
    elector.holds_lease = lambda margin=0.0, epoch=None: holds(margin, epoch) and len(two.api.sent("patch")) < 20
    for _ in range(9):
        two.clock.advance(2.0)
        two.b.exchange_lease()
    assert two.b.leadership.epoch() is None
    first = changed(two)
    assert 20 <= len(first) < 40
    elector.holds_lease = holds
    two.b.cut = True
    two.clock.advance(14.0)
    two.b.exchange_lease()
    two.b.cut = False
    if between == "another":
        two.takes_over(two.a)
    before = len(changed(two))
    two.takes_over(two.b)
    again = changed(two)[before:]
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


def test_after_a_clean_shutdown_the_next_leader_fences_no_pod(two):
    two.api.create_pod("p", 100)
    two.api.create_pod("q", 100)
    assert two.a.bind("q", "n1") == "bound"
    gives_back(two.a)
    takes(two.b)
    assert two.api.sent("patch") == []


@pytest.mark.parametrize("fault", [Fault(status=500), Fault(lost=True), Fault(refused=True)], ids=str)
def test_who_takes_over_from_one_that_missed_an_answer_and_got_it_at_last_changes_nothing(two, fault):
    two.api.create_pod("p", 100)
    two.api.create_pod("q", 100)
    two.api.fault(fault, "create", "*/q/binding")
    assert two.a.bind("q", "n1") == "bound"  # in the end
    gives_back(two.a)
    takes(two.b)
    assert changed(two) == []


@pytest.mark.parametrize("seen", [False, True])
def test_who_takes_over_from_one_that_missed_an_answer_changes_the_pods_unless_it_was_seen_bound(two, seen):
    two.api.create_pod("p", 100)
    two.api.create_pod("q", 100)
    sends_in_vain(two.a, "q")
    if seen:
        bound_ = bound("q", 100, 0)
        two.a.state.set_pod(as_pod(bound_))
    gives_back(two.a)
    takes(two.b)
    assert sorted(changed(two)) == ([] if seen else ["p", "q"])


def test_who_has_taken_over_so_and_takes_its_own_lease_again_changes_what_it_has_not_heard_of(two):
    """A clean shutdown of the former leader says nothing about its own Bindings."""
    gives_back(two.a)
    takes(two.b)
    for name in ("p", "q"):
        two.api.create_pod(name, 100)
    sends_in_vain(two.b, "q")
    loses_and_takes_again(two, two.b)
    assert changed(two) == ["q"]


def test_a_member_without_cards_of_which_nobody_has_heard_is_not_settled_until_it_is_seen_bound(two):
    two.a.state.assume(PodRef("uid-m", "default", "m"), None, "n1", "binpack", epoch=0)
    two.a.state.confirm("uid-m", Phase.UNCONFIRMED)
    assert not two.a.leadership.is_settled()
    member = pod("m", uid="uid-m")
    member["metadata"]["labels"] = {names.GANG: "g"}
    two.a.state.set_pod(as_pod(member))
    assert not two.a.leadership.is_settled()
    member["spec"]["nodeName"] = "n1"
    two.a.state.set_pod(as_pod(member))
    assert two.a.leadership.is_settled()


def test_while_one_looks_what_became_of_a_member_without_cards_it_does_not_say_that_all_was_answered(two):
    two.api.write_object(paths.pods(), pod("m", uid="uid-m"))
    two.api.fault(Fault(refused=True), "create", "*/m/binding")
    settled = []
    two.api.before_request(lambda _: settled.append(two.a.leadership.is_settled()), "get", "*/m", times=math.inf)
    assert two.a.bind("m", "n1") == "bound"
    assert settled == [True, False]
    assert two.a.leadership.is_settled()


def test_while_one_posts_it_does_not_say_that_all_was_answered(two):
    """This holds for every way in which the Lease was released before the response."""
    two.api.create_pod("p", 100)
    with two.a.leadership.allow_post(two.a.leadership.epoch()):
        gives_back(two.a)
    takes(two.b)
    assert len(two.api.sent("patch")) == 1


def test_a_post_counts_before_its_epoch_is_checked(two, monkeypatch):
    """The epoch may end right after that check, and the Binding is sent nevertheless."""
    epoch, holds, settled = two.a.leadership.epoch(), two.a.elector.holds_lease, []

    def check(*args, **settings):
        settled.append(two.a.leadership.is_settled())
        return holds(*args, **settings)

    monkeypatch.setattr(two.a.elector, "holds_lease", check)
    with two.a.leadership.allow_post(epoch) as seconds_left:
        assert seconds_left > 0
    assert settled == [False]


def test_what_one_says_when_it_ends_is_good_for_the_next_alone(two):
    two.api.create_pod("p", 100)
    gives_back(two.a)
    takes(two.b)
    assert two.api.sent("patch") == []
    other = Extender(two.api, "c", two.clock, cards={"n1": 1})
    two.takes_over(other)  # from b, which was killed
    assert len(two.api.sent("patch")) == 1


@pytest.mark.parametrize("has_seen_leader", [False, True])
def test_a_settled_release_that_a_backup_brings_back_says_nothing(two, has_seen_leader):
    """Another extender has led since, and a Binding of its epoch is in progress."""
    gives_back(two.a)
    backup = two.api.get(LEASE)
    assert backup["metadata"]["annotations"][names.FENCED]
    takes(two.b)
    for name in ("mine", "other"):
        two.api.create_pod(name, P100)
    two.takes_over(Extender(two.api, "d", two.clock, cards={"n1": 1}))
    late = binding_of(two.api, "mine")
    c = Extender(two.api, "c", two.clock, cards={"n1": 1})
    if has_seen_leader:
        c.exchange_lease()
    two.api.edit(LEASE, spec=backup["spec"], metadata={"annotations": backup["metadata"]["annotations"]})
    for _ in range(3):
        c.exchange_lease()
    assert c.leadership.epoch() is None
    two.takes_over(c)
    assert c.bind("other", "n1") == "bound"
    with pytest.raises(errors.Conflict):
        two.api.client().create(paths.pods("default", "mine", "binding"), late)
    assert two.api.over_full(P100) == []


def test_one_whose_epoch_never_began_says_nothing_of_those_before(two):
    two.api.create_pod("p", 100)
    two.b.reads = lambda: False
    with pytest.raises(AssertionError):
        two.takes_over(two.b)
    assert two.api.holder() == "b"
    gives_back(two.b)
    takes(two.a)
    assert len(two.api.sent("patch")) == 1


def test_an_epoch_that_ended_while_it_caught_up_does_not_begin(two):
    def slow():
        two.clock.advance(20)
        return True

    two.b.reads = slow
    for _ in range(9):
        two.clock.advance(2.0)
        two.b.elector.step()
    two.b.leadership.step()
    assert two.b.leadership.epoch() is None


def test_plans_of_an_earlier_epoch_are_gone_in_the_next(two):
    two.api.create_pod("p", P100)
    two.a.filter("p", "n1")
    assert mark(two.a.state, "uid-p") == "reserved"
    two.a.cut = True
    two.clock.advance(14)
    two.a.exchange_lease()
    assert mark(two.a.state, "uid-p") is None
    two.a.filter("p", "n1")  # by a call that was under way
    two.a.cut = False
    two.takes_over(two.a)
    assert mark(two.a.state, "uid-p") is None


def test_a_new_leader_wakes_the_pods_that_the_other_had_refused(two):
    two.b.state.next_requeue_node()
    two.takes_over(two.b)
    assert two.b.state.next_requeue_node() == "n1"


def test_the_lease_is_given_back_only_after_the_writes_under_way(two):
    epoch_ended = threading.Event()
    two.a.state.forget_plans = epoch_ended.set  # what the elector's thread does first when the epoch is over
    two.a.elector.start()
    stopping = threading.Thread(target=two.a.leadership.stop)
    with two.a.leadership.allow_post(two.a.leadership.epoch()):
        stopping.start()
        assert epoch_ended.wait(60)
        two.clock.until_waiting()
        assert two.a.leadership.epoch() is None
        assert two.api.holder() == "a"
    assert two.clock.join(stopping, 60)
    assert two.api.holder() == ""


def test_alone_there_is_nothing_to_wait_for():
    alone = Leadership()
    assert alone.denial() is None
    assert alone.is_uninterrupted()
    with alone.allow_post(alone.epoch()) as seconds_left:
        assert seconds_left > 1e9


def test_a_member_without_cards_that_lands_while_an_epoch_begins_is_known_before_it_begins(two):
    """Its Binding assigns no card, so it leaves no annotation of ours."""
    two.api.create_pod("m", 100)
    two.api.edit(paths.pods("default", "m"), metadata={"labels": {names.GANG: "g"}})
    lists = []
    two.b.reads = lambda: lists.append(1) or True

    def lands(call):
        body = {"metadata": {"annotations": {names.LEADER_EPOCH: "x/x/x/99"}}, "target": {"name": "n1"}}
        two.api.client().create(call.path.replace("/status", "/binding"), body)

    two.api.before_request(lands, "patch", "*/status")
    two.takes_over(two.b)
    assert len(lists) == 2

"""The table of reservations: the allowed transitions of phases, and the end of rows."""

import itertools
from collections import Counter

import pytest

from cardwise.core.api import names, request
from cardwise.core.api.mpsprofile import COMMON_CLIENT, MpsClient
from cardwise.core.api.request import Load
from cardwise.core.placement.holding import REPORTED_PHASE
from cardwise.core.placement.ledger import Ledger
from extender.cache import reservations
from extender.cache.capacity import Capacity
from extender.cache.inventory import Inventory
from extender.cache.nodeload import NodeLoads
from extender.cache.reservations import (
    POSTED_PHASES,
    TRANSITIONS,
    UNPOSTED_PHASES,
    Assumed,
    IllegalTransition,
    KnownBinding,
    Phase,
    Reservations,
    Timeouts,
)
from extender.queue.schedulingqueue import SchedulingQueue
from extender.records.podref import PodRef
from tests.build import P100, asking, extended_resource, pod, reported_share
from tests.extender.states import as_card, as_pod, begin, bound, free, make_state, plan, with_cards

POD = PodRef("uid-p", "default", "p")


@pytest.fixture
def table(clock):
    room = Capacity(Ledger(), NodeLoads(), SchedulingQueue(clock))
    return Reservations(Inventory(), room, Timeouts(reservation=30, terminating=20, confirmation=75), clock)


def assigned():
    return as_pod(bound("p", 100, 0))


def begun(table, shares, *, node="n1", mps_client=COMMON_CLIENT):
    """Begin to post a Binding for the pod."""
    table.assume(POD, node, shares, mps_client=mps_client, epoch=1)


def into(table, phase):
    """Bring the pod's reservation into the phase."""
    shares = assigned().assignment
    if phase in UNPOSTED_PHASES:
        table.set_plan(POD, "n1", shares, phase)
    elif phase in POSTED_PHASES:
        begun(table, shares)
        if phase is not Phase.BINDING:
            table.record_binding_outcome(POD.uid, phase)
    elif phase is not None:
        table.mark_bound(assigned())
        if phase is not Phase.BOUND:
            table.mark_deleted(POD.uid, ended=False)
        if phase is Phase.ORPHANED:
            table._clock.advance(21)
            table.expire(table.due_uids())
    row = table.get(POD.uid)
    assert (row.phase if row is not None else None) is phase


@pytest.mark.parametrize(("before", "plan"), list(itertools.product([None, *Phase], sorted(UNPOSTED_PHASES))))
def test_a_plan_replaces_only_what_is_not_posted(table, before, plan):
    into(table, before)
    if plan in TRANSITIONS[before]:
        table.set_plan(POD, "n2", assigned().assignment, plan)
        assert table.get(POD.uid).phase is plan
    else:
        with pytest.raises(IllegalTransition, match=f"default/p cannot change from {before} to {plan}"):
            table.set_plan(POD, "n2", assigned().assignment, plan)
        assert (table.get(POD.uid).phase, table.get(POD.uid).node) == (before, "n1")


@pytest.mark.parametrize("before", [None, *Phase])
def test_a_posted_binding_is_released_only_with_a_known_outcome(table, before):
    into(table, before)
    table.release_plan(POD.uid)
    table.drop_plans()
    table.expire(table.due_uids())
    assert (table.get(POD.uid) is not None) == (before is not None and before not in UNPOSTED_PHASES)


@pytest.mark.parametrize("before", [None, *Phase])
def test_the_word_of_the_api_server_comes_at_any_time(table, before):
    into(table, before)
    table.mark_bound(assigned())
    assert table.get(POD.uid).phase is Phase.BOUND
    table.record_binding_outcome(POD.uid, Phase.UNCONFIRMED)  # a thread that comes back late
    assert table.get(POD.uid).phase is Phase.BOUND
    assert table.pending_bindings() == set()


def test_what_was_posted_is_bound_once_the_watch_shows_the_same(table):
    seen = assigned()
    begun(table, seen.assignment, mps_client=seen.mps_client)
    table.record_binding_outcome(POD.uid, Phase.ACCEPTED)
    table.mark_bound(seen)
    assert (table.get(POD.uid).phase, table.get(POD.uid).holding.phase_name) == (Phase.BOUND, "")


def test_a_bound_pod_holds_what_its_annotations_say_now(table):
    """A user may have set the node: the annotations have the cards of the containers."""
    table.mark_bound(assigned())
    other = as_pod(bound("p", 200, 1))
    table.mark_bound(other)
    assert table.get(POD.uid).holding.assignment == other.assignment
    since = table.get(POD.uid).since
    table._clock.advance(5)
    table.mark_bound(other)
    assert table.get(POD.uid).since == since, "nothing new was said"


@pytest.mark.parametrize(("node", "kept"), [("n1", True), ("n2", False)])
def test_a_pod_that_is_bound_without_its_cards_keeps_what_was_posted_for_that_node(table, node, kept):
    """It may be our Binding, with annotations that were damaged since: the containers have the cards."""
    into(table, Phase.ACCEPTED)
    table.mark_bound(_bare(node))
    assert (table.get(POD.uid) is not None) is kept


def _bare(node):
    manifest = bound("p", 100, 0, node=node, annotations={"cardwise.dev/policy": "spread"})
    manifest["spec"]["containers"][0]["resources"]["limits"][names.SHARE] = "1"
    return as_pod(manifest)


@pytest.mark.parametrize(("node", "load"), [("n1", Load(2000, 1 << 30)), ("n2", None)])
def test_a_plan_that_says_nothing_of_cpu_keeps_that_of_the_plan_before_on_this_node(table, node, load):
    table.set_plan(POD, "n1", assigned().assignment, Phase.RESERVED, load=Load(2000, 1 << 30))
    table.set_plan(POD, node, assigned().assignment, Phase.RESERVED)
    assert table.get(POD.uid).load == load


def test_a_plan_knows_how_the_pod_uses_mps(table):
    table.set_plan(
        POD, "n1", assigned().assignment, Phase.RESERVED, mps_client=MpsClient(off=True, wants=False, user=-1)
    )
    assert table.get(POD.uid).holding.mps_client.off


@pytest.mark.parametrize("before", [phase for phase in Phase if phase is not Phase.BINDING])
def test_of_a_pod_whose_containers_have_ended_nothing_is_left(table, before):
    into(table, before)
    table.mark_deleted(POD.uid, ended=True)
    assert table.get(POD.uid) is None


def test_each_row_is_counted_in_its_phase_alone(table):
    for phase in Phase:
        into(table, phase)
        assert [other for other in Phase if table.count_rows(other)] == [phase]
        table.mark_bound(assigned())
        table.mark_deleted(POD.uid, ended=True)
        assert not any(map(table.count_rows, Phase))


GANG = "default/g"


@pytest.mark.parametrize("heard", [Phase.UNCONFIRMED, Phase.ACCEPTED])
def test_a_gang_counts_on_what_is_posted_until_the_pod_is_seen_bound(table, heard):
    table.set_plan(POD, "n1", assigned().assignment, Phase.WAITING, gang=GANG)
    assert {uid: holding.node for uid, holding in table.gang_plan(GANG).items()} == {POD.uid: "n1"}
    begun(table, assigned().assignment)
    table.record_binding_outcome(POD.uid, heard)
    assert [holding.phase for holding in table.gang_plan(GANG).values()] == [heard]
    table.mark_bound(assigned())
    assert table.gang_plan(GANG) == {}


def test_what_surely_was_not_posted_waits_again_with_its_gang(table):
    table.set_plan(POD, "n1", assigned().assignment, Phase.WAITING, gang=GANG)
    begun(table, assigned().assignment)
    table.record_binding_outcome(POD.uid, None)
    assert [row.phase for row in table.gang_plan(GANG).values()] == [Phase.WAITING]


@pytest.mark.parametrize("heard", [Phase.UNCONFIRMED, Phase.ACCEPTED, None])
def test_what_is_posted_stands_though_its_gang_does_not_count_on_it_any_more(table, heard):
    table.set_plan(POD, "n1", assigned().assignment, Phase.WAITING, gang=GANG)
    begun(table, assigned().assignment)
    table.release_plan(POD.uid)
    assert (table.gang_plan(GANG), table.get(POD.uid).phase) == ({}, Phase.BINDING)
    table.record_binding_outcome(POD.uid, heard)
    assert [row.phase for row in table.rows_in_phases(*Phase)] == ([heard] if heard is not None else [])
    assert table.gang_plan(GANG) == {}


@pytest.mark.parametrize("change", ["given up", "planned alone", "elsewhere", "gone", "dropped"])
def test_a_member_that_loses_its_place_is_in_the_plan_no_more(table, change):
    table.set_plan(POD, "n1", assigned().assignment, Phase.WAITING, gang=GANG)
    match change:
        case "given up":
            table.release_plan(POD.uid)
        case "planned alone":
            table.set_plan(POD, "n1", assigned().assignment, Phase.RESERVED)
        case "elsewhere":
            begun(table, assigned().assignment, node="n2")
        case "gone":
            table.mark_deleted(POD.uid, ended=False)
        case "dropped":
            table.drop_plans()
    assert table.gang_plan(GANG) == {}


@pytest.mark.parametrize("before", list(Phase))
def test_what_is_posted_becomes_a_plan_of_filters_never_again(table, before):
    into(table, before)
    if Phase.RESERVED in TRANSITIONS[before]:
        table.promote_nomination(POD.uid)
        assert table.get(POD.uid).phase is Phase.RESERVED
    else:
        with pytest.raises(IllegalTransition):
            table.promote_nomination(POD.uid)
        assert [other for other in Phase if table.count_rows(other)] == [before]


def begin_plain(world, name="m"):
    return world.assume(PodRef(f"uid-{name}", "default", name), None, "n1", "binpack", epoch=0)


def test_a_pod_without_cards_is_no_share_in_the_metrics(table):
    begun(table, None)
    assert table.pending_bindings() == {POD.uid}
    assert set(table.phase_counts().values()) == {0}
    assert not any(table.count_shares(table.uids_to_count()).values())


@pytest.mark.parametrize("heard", [Phase.UNCONFIRMED, Phase.ACCEPTED, None])
def test_a_pod_without_cards_that_vanishes_while_it_is_posted_leaves_nothing(clock, heard):
    """Its UID was kept for ever as one of which a Binding may land: the Lease was never given back as settled."""
    world = with_cards(make_state(clock), n1=1)
    manifest = pod("m", uid="uid-m")
    manifest["metadata"]["labels"] = {names.GANG: "g"}
    seen = as_pod(manifest)
    world.set_pod(seen)
    begin_plain(world)
    world.remove_pod(seen)
    world.record_binding_outcome("uid-m", heard)
    assert world.pending_bindings() == set()


def test_a_pod_without_cards_of_which_nobody_has_heard_is_looked_up(clock):
    world = with_cards(make_state(clock), n1=1)
    begin_plain(world)
    world.record_binding_outcome("uid-m", Phase.UNCONFIRMED)
    assert world.pending_bindings() == {"uid-m"}
    clock.advance(76)
    world.expire_reservations()
    assert world.overdue_bindings() == [PodRef("uid-m", "default", "m")]
    world.on_lookup("uid-m", bound=False, exists=True)
    assert world.pending_bindings() == set()


def test_a_member_that_another_scheduler_bound_elsewhere_holds_no_card_here(clock):
    """It kept the card for as long as the pod lived: each look-up found it bound."""
    world = with_cards(make_state(clock), n1=1, n2=1)
    whole = free(world)
    pod_request = request.parse(asking("p", gpu_mem=8138))
    world.assume(PodRef("uid-p", "default", "p"), pod_request, "n1", "binpack", epoch=0)
    world.record_binding_outcome("uid-p", Phase.UNCONFIRMED)
    bound_pod = asking("p", gpu_mem=8138)
    bound_pod["metadata"].setdefault("labels", {})[names.GANG] = "g"
    bound_pod["spec"]["nodeName"] = "n2"
    world.set_pod(as_pod(bound_pod))
    assert free(world) == whole


def test_the_longest_silent_lapsed_are_forgotten_first(table, clock, monkeypatch):
    monkeypatch.setattr(reservations, "_MAX_ORPHANED", 1)
    for name in ("a", "b"):
        table.mark_bound(as_pod(bound(name, 100, 0)))
        table.mark_deleted(f"uid-{name}", ended=False)
        clock.advance(1)
    clock.advance(21)
    assert {holding.pod.uid for holding in table.expire(table.due_uids())} == {"uid-a", "uid-b"}
    assert not table.drop_surplus_orphans(2)
    assert [holding.pod.uid for holding in table.rows_in_phases(Phase.ORPHANED)] == ["uid-b"]


@pytest.mark.parametrize(("epoch", "then"), [(7, Assumed), (8, KnownBinding)])
def test_what_an_earlier_epoch_may_have_posted_is_not_posted_again(clock, epoch, then):
    """Another extender may have given the cards away in between. In the same epoch the same cards are written again."""
    world = with_cards(make_state(clock), n1=1)
    first = begin(world, "p", 10, epoch=7)
    world.record_binding_outcome("uid-p", Phase.UNCONFIRMED)
    again = begin(world, "p", 10, epoch=epoch)
    assert isinstance(again, then)
    assert again.assignment == first.assignment


@pytest.mark.parametrize("before", [None, *Phase])
def test_a_pod_that_the_watch_shows_waiting_again_is_looked_up(table, clock, before):
    """etcd was restored from a backup: for ever the row counted, and bind answered success without posting anything."""
    into(table, before)
    table.mark_unbound(POD.uid)
    if before not in (Phase.BOUND, Phase.TERMINATING):
        assert (row.phase if (row := table.get(POD.uid)) is not None else None) is before
        return
    assert table.known_binding(POD.uid).phase is Phase.UNCONFIRMED
    clock.advance(150)  # longer than its node may take to report its containers
    assert table.overdue_pods() == []
    clock.advance(0.1)
    assert table.overdue_pods() == [POD]
    table.on_lookup(POD.uid, bound=True, exists=True)
    assert table.holding(POD.uid) is not None, "it is bound: the watch is behind"
    clock.advance(150.1)
    table.on_lookup(POD.uid, bound=False, exists=True)
    assert table.get(POD.uid) is None


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_of_a_pod_that_waits_again_no_epoch_posts_the_former_cards(clock, epoch):
    world = with_cards(make_state(clock), n1=1)
    whole = free(world)
    world.set_pod(as_pod(bound("p", 10, 0)))
    waiting = as_pod(asking("p", gpu_mem=10))
    world.set_pod(waiting)
    assert isinstance(begin(world, "p", 10, epoch=epoch), KnownBinding)
    clock.advance(150.1)
    world.expire_reservations()
    (due,) = world.overdue_bindings()
    world.on_lookup(due.uid, bound=False, exists=True)
    assert free(world) == whole
    assert isinstance(begin(world, "p", 10, epoch=epoch), Assumed)


def test_of_a_pod_that_waits_again_the_node_has_its_cpu_back_and_its_report_counts(clock):
    world = with_cards(make_state(clock), n1=1)
    whole = free(world)
    world.set_node("n1")
    before = len(world.snapshot().loads._pods)
    world.set_pod(as_pod(bound("p", 10, 0)))
    world.set_pod(as_pod(asking("p", gpu_mem=10)))
    assert len(world.snapshot().loads._pods) == before
    world.set_card(*as_card(extended_resource(0, reported=[reported_share("uid-p", 10)])))
    clock.advance(150.1)
    world.expire_reservations()
    world.on_lookup("uid-p", bound=False, exists=True)
    assert free(world) == [whole[0] - 10, *whole[1:]], "its containers still run there"
    world.set_card(*as_card(extended_resource(0)))
    assert free(world) == whole


@pytest.mark.parametrize("known", ["planned", "bound", "deleted"])
def test_the_former_card_of_a_pod_that_is_placed_on_its_node_again_counts_while_the_node_reports_it(clock, known):
    world = with_cards(make_state(clock), n1=2)
    world.set_pod(as_pod(bound("p", 10000, 0)))
    world.set_pod(as_pod(asking("p", gpu_mem=10000)))
    world.set_card(*as_card(extended_resource(0, reported=[reported_share("uid-p", 10000)])))
    clock.advance(150.1)
    world.expire_reservations()
    world.on_lookup("uid-p", bound=False, exists=True)
    assert free(world) == [P100 - 10000, P100]
    if known == "planned":
        begin(world, "p", 10000)
    else:
        world.set_pod(as_pod(bound("p", 10000, 1)))
    if known == "deleted":
        world.remove_pod(as_pod(bound("p", 10000, 1)))
    assert free(world) == [P100 - 10000, P100 - 10000]
    assert world.reservation_counts()[REPORTED_PHASE] == (2 if known == "deleted" else 1)
    world.set_card(*as_card(extended_resource(0)))
    assert free(world) == ([P100, P100] if known == "deleted" else [P100, P100 - 10000])


def test_of_a_card_that_a_pod_has_in_both_bindings_the_larger_amount_counts(clock):
    world = with_cards(make_state(clock), n1=2)
    world.set_pod(as_pod(bound("p", 4000, 0)))
    for mib, counts in ((3000, 4000), (4000, 4000), (10000, 10000)):
        world.set_card(*as_card(extended_resource(0, reported=[reported_share("uid-p", mib)])))
        assert free(world) == [P100 - counts, P100]
    assert world.reservation_counts()[REPORTED_PHASE] == 1
    world.remove_pod(as_pod(bound("p", 4000, 0)))
    assert free(world) == [P100 - 10000, P100]
    world.set_card(*as_card(extended_resource(0)))
    assert free(world) == [P100, P100]


# Time.


@pytest.mark.parametrize(
    ("before", "seconds", "then"),
    [
        (Phase.NOMINATED, 30, None),
        (Phase.RESERVED, 30, None),
        (Phase.TERMINATING, 20, Phase.ORPHANED),
        (Phase.WAITING, 1000, Phase.WAITING),
    ],
)
def test_it_counts_for_its_time_and_no_longer(table, clock, before, seconds, then):
    into(table, before)
    clock.advance(seconds)
    assert table.expire(table.due_uids()) == []
    assert table.get(POD.uid).phase is before
    clock.advance(0.1)
    table.expire(table.due_uids())
    assert [row.phase for row in table.rows_in_phases(*Phase)] == ([then] if then is not None else [])


@pytest.mark.parametrize("posted", [Phase.UNCONFIRMED, Phase.ACCEPTED])
def test_what_no_event_has_confirmed_is_looked_up_and_after_each_failure_later(table, clock, posted):
    """Also what was accepted: the watch may have missed the pod, and its share would count for ever."""
    into(table, posted)
    clock.advance(75)
    assert table.overdue_pods() == []
    clock.advance(0.1)
    for pause in (1, 2, 4, 8, 16, 32, 64, 64):
        assert table.overdue_pods() == [POD]
        table.on_lookup_failed(POD.uid)
        clock.advance(pause - 0.1)
        assert table.overdue_pods() == []
        clock.advance(0.1)


def test_of_many_deleted_pods_only_some_are_handled_in_one_hold_of_the_lock(clock, monkeypatch):
    """A tenant deletes 10,000 pods by force: they ended, and were counted for the metrics, in one hold each."""
    world, lengths = with_cards(make_state(clock), n1=1), list[int]()
    monkeypatch.setattr(reservations, "_MAX_ORPHANED", 30)

    def record(name):
        method = getattr(Reservations, name)

        def call(table, pods):
            lengths.append(pods if isinstance(pods, int) else len(pods))
            return method(table, pods)

        monkeypatch.setattr(Reservations, name, call)

    for name in ("expire", "count_shares", "drop_surplus_orphans"):
        record(name)
    for i in range(350):
        world.set_pod(as_pod(bound(f"p{i}", 1, 0)))
        world.remove_pod(as_pod(bound(f"p{i}", 1, 0)))
    assert world.reservation_counts()["terminating"] == 350
    clock.advance(21)
    world.expire_reservations()
    assert world.reservation_counts()["terminating"] == 0
    assert free(world) == [P100]
    assert len(list(world._reservations.rows_in_phases(Phase.ORPHANED))) == 30
    assert max(lengths) == 100


# Metrics.


def test_each_share_is_counted_once_in_the_metrics(clock):
    world = with_cards(make_state(clock), n1=1)
    for name in ("orphaned", "terminating", "still"):
        world.set_pod(as_pod(bound(name, 10, 0)))
        world.remove_pod(as_pod(bound(name, 10, 0)))
        if name == "orphaned":
            clock.advance(21)
            world.expire_reservations()
    world.set_pod(as_pod(bound("a", 10, 0)))
    plan(world, "p", 10)
    for name, heard in (("b", None), ("u", Phase.UNCONFIRMED), ("c", Phase.ACCEPTED)):
        begin(world, name, 10)
        if heard is not None:
            world.record_binding_outcome(f"uid-{name}", heard)
    reported = ("uid-a", "uid-still", "one", "two")
    world.set_card(*as_card(extended_resource(0, reported=[reported_share(uid, 10) for uid in reported])))
    with world.view() as ledger:
        counts = Counter(holding.phase_name or "bound" for holding in ledger.holdings())
    assert world.reservation_counts() == counts
    assert counts == {"bound": 2, "reserved": 1, "binding": 1, "unconfirmed": 1, "terminating": 1, "reported": 3}

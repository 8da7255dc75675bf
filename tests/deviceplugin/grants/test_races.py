"""What threads may do to each other: deliveries beside a restore or an adoption, and two who free at once."""

import json
import sys
import threading
from types import SimpleNamespace

import pytest

from cardwise.core.api import assignment as codec
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.values.quantity import MiB
from cardwise.gpus.protocol import DevicePath, GpuCard
from cardwise.kube import errors
from deviceplugin.grants import cdi
from deviceplugin.grants.access import Delivery
from deviceplugin.grants.grants import AddedGrant, Grant, GrantStore
from deviceplugin.grants.hardware import Hardware
from deviceplugin.grants.release import Releaser
from deviceplugin.sources.containers import RuntimeUnavailable
from tests.deviceplugin import records
from tests.deviceplugin.fakenode import PATIENCE
from tests.fakes.clock import FakeClock

TOTAL = 16276  # MiB
CARDS = {
    f"GPU-{index}": GpuCard(
        index=index,
        uuid=f"GPU-{index}",
        model="m",
        memory=MiB(TOTAL),
        devices=(DevicePath(device, f"/dev/nvidia{index}"),),
    )
    for index, device in enumerate(("/dev/null", "/dev/zero"))
}
HERE = Hardware(CARDS, {})
TOTALS = dict.fromkeys(CARDS, TOTAL)


def grant(uid: str, slot: str, card: int) -> Grant:
    return records.grant(uid, CardShare(card, f"GPU-{card}", 100, 0, TOTAL), slots=(slot,))


LIVING = records.pod_view(annotations=codec.encode(Assignment({"0": grant("u1", "s001", 0).shares}), assume_time_ns=1))


class Node:
    def __init__(self, folder) -> None:
        self.grants = GrantStore(folder / "grants")
        self.folder = folder / "cdi"
        self.delivery = Delivery(self.folder, None)

    def prestart(self, grant: Grant) -> None:
        assert isinstance(self.grants.add(grant, TOTALS), AddedGrant)
        self.delivery.deliver_grant(grant, HERE)

    def device(self, slot: str) -> str:
        spec = json.loads(cdi.spec_path(self.folder, slot).read_text())
        return spec["devices"][0]["containerEdits"]["deviceNodes"][0]["path"]


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


class ToldLock:
    """Says when somebody has to wait for it."""

    def __init__(self, waited_for: threading.Event) -> None:
        self._lock = threading.Lock()
        self._waited_for = waited_for

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waited_for.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("slot", ["s001", "s002"], ids=["a slot that changes hands", "a new slot"])
@pytest.mark.parametrize(
    ("work", "moment"),
    [
        ("restore_specs", "find_stale_specs"),
        ("restore_specs", "write_spec"),
        ("remove_unused_specs", "find_stale_specs"),
    ],
)
def test_a_delivery_beside_other_work_on_the_specs_is_kept(node, monkeypatch, slot, work, moment):
    node.prestart(grant("old", "s001", 0))
    on_its_way = threading.Event()  # the other has come to the lock, or has ended

    def deliver() -> None:
        node.prestart(grant("new", slot, 1))
        on_its_way.set()

    other = threading.Thread(target=deliver)
    node.delivery._lock = ToldLock(on_its_way)
    real = getattr(cdi, moment)

    def meanwhile(*arguments):
        if threading.current_thread() is not other and other.ident is None:
            other.start()
            assert on_its_way.wait(PATIENCE)
        return real(*arguments)

    monkeypatch.setattr(cdi, moment, meanwhile)
    getattr(node.delivery, work)(node.grants, *([HERE] if work == "restore_specs" else []))
    other.join()
    assert node.device(slot) == "/dev/nvidia1"


def test_an_adoption_writes_its_own_slots_only(node):
    node.prestart(grant("other", "s002", 1))
    cdi.spec_path(node.folder, "s002").unlink()
    node.grants.adopt_grant(grant("running", "s001", 0))
    node.delivery.rewrite_specs(["s001", "s003"], node.grants, HERE)
    assert node.device("s001") == "/dev/nvidia0"
    assert [path.name for path in node.folder.iterdir()] == [cdi.spec_path(node.folder, "s001").name]


def test_an_adopted_grant_takes_no_slot_from_a_newer_one(node):
    """The container was alive when the runtime was asked, and its slot has gone to the next one since."""
    node.prestart(grant("next", "s001", 1))
    node.grants.adopt_grant(grant("ended", "s001", 0))
    node.delivery.rewrite_specs(["s001"], node.grants, HERE)
    assert node.grants.slot_owner("s001").pod_uid == "next"
    assert node.device("s001") == "/dev/nvidia1"
    assert GrantStore(node.grants._folder).slot_owner("s001").pod_uid == "next"


def test_what_is_granted_while_the_proof_is_sought_stays(node):
    """The answers are from before: they say nothing of the container that starts now."""
    node.prestart(grant("u1", "s001", 0))

    def start_meanwhile(*_: object) -> None:
        node.prestart(grant("u1", "s001", 0))  # and so the pod is gone for the API server, but not for the kubelet

    pods = SimpleNamespace(find_pod=lambda uid: None, synced=True, fetch_pod=start_meanwhile)
    containers = SimpleNamespace(live_containers=lambda uids: {})
    releaser = Releaser(
        pods=pods, containers=containers, grants=node.grants, delivery=node.delivery, on_change=lambda: None
    )
    releaser.release_ended({"u1"})
    assert node.grants.slot_owner("s001").pod_uid == "u1"
    assert node.device("s001") == "/dev/nvidia0"
    pods.fetch_pod = lambda *_: None
    releaser.release_ended({"u1"})
    assert node.grants.list_grants() == []


def test_a_spec_whose_grant_is_dropped_before_it_is_written_is_removed_by_the_next_pass(node):
    ending = grant("ending", "s001", 0)
    assert isinstance(node.grants.add(ending, TOTALS), AddedGrant)
    node.grants.drop_grants_of_pod("ending", node.grants.epoch())
    node.delivery.deliver_grant(ending, HERE)
    node.prestart(grant("other", "s002", 0))
    releaser = Releaser(
        pods=SimpleNamespace(find_pod=lambda uid: LIVING),
        containers=SimpleNamespace(),
        grants=node.grants,
        delivery=node.delivery,
        on_change=lambda: None,
    )
    releaser.sweep_grants()
    assert [path.name for path in node.folder.iterdir()] == [cdi.spec_path(node.folder, "s002").name]


def test_a_slot_that_is_given_again_while_its_last_holder_is_freed_keeps_its_spec(node, monkeypatch):
    node.prestart(grant("ended", "s001", 0))
    drop = node.grants.drop_grants_of_pod

    def drop_and_give(uid, epoch):
        dropped = drop(uid, epoch)
        node.prestart(grant("next", "s001", 1))
        return dropped

    monkeypatch.setattr(node.grants, "drop_grants_of_pod", drop_and_give)
    pods = SimpleNamespace(find_pod=lambda uid: SimpleNamespace(finished=True), synced=True)
    releaser = Releaser(
        pods=pods,
        containers=SimpleNamespace(live_containers=lambda uids: {}),
        grants=node.grants,
        delivery=node.delivery,
        on_change=lambda: None,
    )
    releaser.release_ended({"ended"})
    assert node.device("s001") == "/dev/nvidia1"


@pytest.mark.parametrize(("container_name", "held_names"), [("main", [True, True]), ("", [False, True])])
def test_an_ended_pods_share_is_told_at_once_but_of_a_sandbox_alone_only_when_it_stays(
    node, container_name, held_names
):
    node.prestart(grant("u1", "s001", 0))
    pods = SimpleNamespace(find_pod=lambda uid: LIVING, synced=True, fetch_pod=lambda *_: None)
    containers = SimpleNamespace(live_containers=lambda uids: {uid: {container_name} for uid in uids})
    releaser = Releaser(
        pods=pods, containers=containers, grants=node.grants, delivery=node.delivery, on_change=lambda: None
    )
    releaser.sweep_grants()
    assert releaser.reported_shares() == {}
    pods.find_pod = lambda uid: None  # force-deleted
    seen = []
    for _ in held_names:
        releaser.sweep_grants()
        seen.append("GPU-0" in releaser.reported_shares())
    assert seen == held_names


def test_what_is_held_is_not_known_before_the_runtime_has_answered(node):
    node.prestart(grant("u1", "s001", 0))

    def raise_unavailable(_: object) -> None:
        raise RuntimeUnavailable("no answer")

    containers = SimpleNamespace(live_containers=raise_unavailable)
    releaser = Releaser(
        pods=SimpleNamespace(find_pod=lambda uid: None, synced=True, fetch_pod=lambda *_: None),
        containers=containers,
        grants=node.grants,
        delivery=node.delivery,
        on_change=lambda: None,
    )
    releaser.sweep_grants()
    assert (releaser.reported_shares(), releaser.problem) == (None, "no answer")
    containers.live_containers = lambda uids: {uid: {"main"} for uid in uids}
    releaser.sweep_grants()
    assert (list(releaser.reported_shares()), releaser.problem) == (["GPU-0"], None)


def test_who_tells_of_reported_shares_is_called_when_they_change_and_only_then(node):
    node.prestart(grant("u1", "s001", 0))
    pods = SimpleNamespace(find_pod=lambda uid: LIVING, synced=True, fetch_pod=lambda *_: None)
    calls, seen = [], []
    releaser = Releaser(
        pods=pods,
        containers=SimpleNamespace(live_containers=lambda uids: {uid: {"main"} for uid in uids}),
        grants=node.grants,
        delivery=node.delivery,
        on_change=lambda: calls.append(list(releaser.reported_shares())),
    )
    for round_ in range(4):
        if round_ == 2:
            pods.find_pod = lambda uid: None  # force-deleted
        releaser.sweep_grants()
        seen.append(list(calls))
    assert seen == [[[]], [[]], [[], ["GPU-0"]], [[], ["GPU-0"]]]


def releaser_of_deleted_pods(node, fetch_pod, clock, *, bound_again: bool) -> tuple[Releaser, set[str]]:
    """With twenty pods whose end the API server must confirm: deleted, or bound here again with another card."""
    uids = {f"u{number}" for number in range(20)}
    for number, uid in enumerate(sorted(uids)):
        node.grants.adopt_grant(grant(uid, f"s{number:03}", int(bound_again)))
    pods = SimpleNamespace(find_pod=lambda _: LIVING if bound_again else None, synced=True, fetch_pod=fetch_pod)
    containers = SimpleNamespace(live_containers=lambda _: {})
    return Releaser(
        pods=pods,
        containers=containers,
        grants=node.grants,
        delivery=node.delivery,
        on_change=lambda: None,
        clock=clock,
    ), uids


@pytest.mark.parametrize("bound_again", [False, True])
def test_the_pods_whose_end_must_be_confirmed_are_read_at_once(node, bound_again):
    """A start that waits for them has 30 s, and each read takes 3 s while the API server hangs."""
    eight = threading.Barrier(8)
    reads = []

    def fetch_pod(_namespace: str, _name: str, uid: str) -> object:
        reads.append(uid)
        if len(reads) <= 8:
            eight.wait(PATIENCE)
        return LIVING if bound_again else None

    releaser, uids = releaser_of_deleted_pods(node, fetch_pod, FakeClock(), bound_again=bound_again)
    assert releaser.release_ended(uids)
    assert sorted(reads) == sorted(uids)
    assert node.grants.list_grants() == []


@pytest.mark.parametrize("bound_again", [False, True])
def test_no_read_of_a_pods_end_begins_after_three_seconds(node, bound_again, clock):
    eight = threading.Barrier(8, action=lambda: clock.advance(3))
    reads = []

    def fetch_pod(_namespace: str, _name: str, uid: str) -> object:
        reads.append(uid)
        eight.wait(PATIENCE)
        raise errors.Unreachable("timed out")

    releaser, uids = releaser_of_deleted_pods(node, fetch_pod, clock, bound_again=bound_again)
    assert not releaser.release_ended(uids), "nobody has answered for them"
    assert len(reads) == 8
    assert len(node.grants.list_grants()) == 20


def test_a_round_goes_on_while_a_start_frees(node):
    releaser = Releaser(
        pods=SimpleNamespace(), containers=None, grants=node.grants, delivery=node.delivery, on_change=lambda: None
    )
    uids = [f"u{number}" for number in range(3000)]
    done, rounds = threading.Event(), []

    def starts() -> None:
        while not done.is_set():
            for uid in uids:
                releaser._mark_ended(uid, {""})
            with releaser._lock:
                releaser._ended_passes.clear()
            rounds.append(len(uids))

    thread = threading.Thread(target=starts)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        published = 0
        while published < 200 or not rounds:
            releaser._publish_reported_shares(complete=True)
            published += 1
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_a_claim_whose_file_somebody_has_removed_is_taken_back_all_the_same(node, tmp_path):
    claim = node.grants.add(grant("a", "s001", 0), TOTALS)
    (tmp_path / "grants" / "a" / "main.json").unlink()
    node.grants.undo_add(claim)
    assert node.grants.list_grants() == []


@pytest.mark.parametrize("then", ["is given again", "is dropped"])
def test_what_is_on_the_disk_is_what_was_decided_last(node, tmp_path, monkeypatch, then):
    """Between the decision and the write another thread decides: the kubelet has given the first call up."""
    disk_of, others = node.grants._disk_lock, [grant("a", "s002", 0)]

    def between(pod_uid):
        while others:
            other = others.pop()
            if then == "is dropped":
                node.grants.drop_grants_of_pod("a", node.grants.epoch())
            else:
                assert isinstance(node.grants.add(other, TOTALS), AddedGrant)
        return disk_of(pod_uid)

    monkeypatch.setattr(node.grants, "_disk_lock", between)
    assert isinstance(node.grants.add(grant("a", "s001", 0), TOTALS), AddedGrant)
    on_disk = [grant.slots for grant in GrantStore(tmp_path / "grants").list_grants()]
    assert on_disk == [grant.slots for grant in node.grants.list_grants()]


def test_only_what_the_claim_itself_has_entered_is_taken_back(node, tmp_path):
    """The kubelet has given the first call up, and its next call comes before that one's end."""
    first, second = (node.grants.add(grant("a", slot, 0), TOTALS) for slot in ("s001", "s002"))

    def on_disk() -> list[Grant]:
        return GrantStore(tmp_path / "grants").list_grants()

    node.grants.undo_add(first)
    assert node.grants.list_grants() == on_disk() == [second.grant]
    node.grants.undo_add(second)
    assert node.grants.list_grants() == on_disk() == [first.grant]
    node.grants.undo_add(first)
    assert node.grants.list_grants() == on_disk() == []
    assert list((tmp_path / "grants").iterdir()) == []

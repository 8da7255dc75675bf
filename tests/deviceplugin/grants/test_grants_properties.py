"""Rules 1 and 3 of architecture.md on a node's disk: never above a card, always freed, whatever the order."""

import json
import shutil
import stat
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from cardwise.core.api.assignment import CardShare
from deviceplugin.grants.grants import AddedGrant, Grant, GrantStore, merge_by_pod
from tests.deviceplugin import records
from tests.deviceplugin.conftest import MEMORY
from tests.examples import examples

TOTAL = 100  # MiB of each card
CARDS = ("GPU-0", "GPU-1")
TOTALS = dict.fromkeys(CARDS, TOTAL)


def grant(uid: str, container: str, card: int, mem: int, core: int = 0) -> Grant:
    """One of two equal containers of a pod; the pod has twice as much."""
    share = CardShare(card, CARDS[card], mem, core, TOTAL)
    return records.grant(uid, share, container=container, slots=(f"{uid}-{container}",), pod_shares=(share, share))


class Disk(RuleBasedStateMachine):
    """Pods claim, restart and end; the process is killed at any moment, also between two files."""

    pods = Bundle("pods")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="cw-grants-", dir=MEMORY))
        self.store = GrantStore(self.folder / "grants")
        self.count = 0
        self.started: set[tuple[str, str]] = set()
        self.ended: set[str] = set()

    def teardown(self) -> None:
        for uid in {grant.pod_uid for grant in self.store.list_grants()}:
            self.store.drop_grants_of_pod(uid, self.store.epoch())
        assert self.store.list_grants() == []
        assert list((self.folder / "grants").iterdir()) == []
        shutil.rmtree(self.folder)

    @rule(target=pods, card=st.integers(0, 1), mem=st.integers(2, TOTAL), core=st.sampled_from([0, 0, 40, 70]))
    def bind(self, card, mem, core):
        self.count += 1
        return (f"pod{self.count}", card, mem, core)

    @rule(pod=pods, container=st.sampled_from(["a", "b"]))
    def prestart(self, pod, container):
        uid, card, mem, core = pod
        if uid in self.ended:
            return
        mine = grant(uid, container, card, mem // 2, core // 2)
        before = self.store.get(uid, container)
        entered = isinstance(self.store.add(mine, TOTALS), AddedGrant)
        if before is not None or self.store.grants_of_pod(uid):
            assert entered, "a pod that has begun may always go on, and a container restart"
        if entered:
            self.started.add((uid, container))

    @rule(pod=pods, container=st.sampled_from(["a", "b"]))
    def given_up(self, pod, container):
        uid, card, mem, core = pod
        before = self.store.list_grants()
        if uid in self.ended:
            return
        claim = self.store.add(grant(uid, container, card, mem // 2, core // 2), TOTALS)
        if isinstance(claim, AddedGrant):
            self.store.undo_add(claim)
        assert self.store.list_grants() == before

    @rule(pod=pods)
    def end(self, pod):
        uid = pod[0]
        epoch = self.store.epoch()
        self.ended.add(uid)
        self.started -= {(uid, "a"), (uid, "b")}
        self.store.drop_grants_of_pod(uid, epoch)
        assert self.store.grants_of_pod(uid) == []

    @rule(pod=pods)
    def an_old_proof_frees_nothing_newer(self, pod):
        uid, card, mem, core = pod
        epoch = self.store.epoch()
        if uid not in self.ended and self.store.get(uid, "a") is not None:
            mine = grant(uid, "a", card, mem // 2, core // 2)
            assert isinstance(self.store.add(mine, TOTALS), AddedGrant)
            assert self.store.drop_grants_of_pod(uid, epoch) == []
            assert self.store.get(uid, "a") is not None

    @rule(junk=st.sampled_from([None, ".a.tmp"]))
    def killed(self, junk):
        if junk:
            (self.folder / "grants" / "half").mkdir(exist_ok=True)
            (self.folder / "grants" / "half" / junk).write_text("{")
        self.store = GrantStore(self.folder / "grants")
        assert self.store.unreadable == []

    @invariant()
    def no_card_is_above_its_size(self):
        on_disk = GrantStore(self.folder / "grants")
        for store in (self.store, on_disk):
            for card in CARDS:
                shares = [s for grant in merge_by_pod(store.list_grants()) for s in grant.pod_shares if s.uuid == card]
                assert sum(share.mem for share in shares) <= TOTAL
                assert sum(share.core for share in shares) <= 100

    @invariant()
    def what_started_is_granted_and_nothing_else(self):
        assert {(grant.pod_uid, grant.container) for grant in self.store.list_grants()} == self.started


TestDisk = Disk.TestCase
TestDisk.settings = settings(max_examples=examples(30, soak=600), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(("mib", "percent", "fits"), [(200, 100, True), (199, 100, False), (200, 99, False)])
def test_a_card_is_given_to_its_last_mib_and_percent_and_no_further(tmp_path, mib, percent, fits):
    store = GrantStore(tmp_path / "grants", core=percent)
    assert isinstance(store.add(grant("first", "a", 0, 40, 10), {"GPU-0": mib}), AddedGrant)
    assert isinstance(store.add(grant("second", "a", 0, 60, 40), {"GPU-0": mib}), AddedGrant) is fits


def test_a_slot_is_its_latest_holders_also_when_the_time_of_day_is_set_back(tmp_path, clock):
    store = GrantStore(tmp_path / "grants", clock=clock)
    for number, day in enumerate((20, 10, 1)):
        clock.set_wall(datetime(2026, 1, day, tzinfo=UTC))
        mine = msgspec.structs.replace(grant(f"u{number}", "a", 0, 10), slots=("s001",))
        assert isinstance(store.add(mine, TOTALS), AddedGrant)
        assert store.slot_owner("s001").pod_uid == f"u{number}"
        store = GrantStore(tmp_path / "grants", clock=clock)
        assert store.slot_owner("s001").pod_uid == f"u{number}"


def test_a_share_is_on_the_disk_under_the_names_that_former_versions_read(tmp_path):
    GrantStore(tmp_path / "grants").add(grant("u1", "a", 0, 10), TOTALS)
    written = json.loads((tmp_path / "grants" / "u1" / "a.json").read_text())
    share = {"index": 0, "uuid": "GPU-0", "mem": 10, "core": 0, "total": TOTAL, "whole": False}
    assert (written["shares"], written["podShares"]) == ([share], [share, share])


def test_an_unreadable_grant_is_moved_aside_and_reported(tmp_path):
    store = GrantStore(tmp_path / "grants")
    store.add(grant("u1", "a", 0, 10), TOTALS)
    path = tmp_path / "grants" / "u1" / "a.json"
    for bad in ("", "{", '{"version": 9}', path.read_text().replace('"u1"', '"u2"')):
        path.parent.mkdir(exist_ok=True)
        path.write_text(bad)
        again = GrantStore(tmp_path / "grants")
        assert again.list_grants() == []
        assert str(path) in again.unreadable[0]
        assert not path.exists()
    aside = tmp_path / "grants-unreadable"
    assert len(list(aside.iterdir())) == 4
    assert stat.S_IMODE(aside.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "newer",
    [
        {"version": 9, "podUid": "u1", "cards": {"GPU-0": 10}},
        {"version": 9, "shares": "of another kind"},
        {"version": {"major": 9}},
    ],
    ids=["other fields", "other types", "another version field"],
)
def test_a_grant_of_a_newer_device_plugin_is_kept_aside_with_what_to_do(tmp_path, newer):
    """A downgrade. Whatever the file has, its version is looked at first; the other grants are read as always."""
    store = GrantStore(tmp_path / "grants")
    for pod, card in (("u1", 0), ("u2", 1)):
        store.add(grant(pod, "a", card, 10), TOTALS)
    path = tmp_path / "grants" / "u1" / "a.json"
    path.write_text(json.dumps(newer))
    again = GrantStore(tmp_path / "grants")
    assert [grant.pod_uid for grant in again.list_grants()] == ["u2"]
    (problem,) = again.unreadable
    assert str(path) in problem
    assert "another version of the device plugin" in problem
    assert "this one reads 1;" in problem
    (aside,) = (tmp_path / "grants-unreadable").iterdir()
    assert json.loads(aside.read_text()) == newer

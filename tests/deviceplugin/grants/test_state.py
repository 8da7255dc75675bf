"""The state folder: cleaned up under a running agent, and where nothing can be written to it."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from cardwise.core.api import mps
from cardwise.core.api.assignment import CardShare
from deviceplugin.grants import cdi
from deviceplugin.grants.grants import AddedGrant, GrantedDevice, GrantStore, UnsafeName
from tests.deviceplugin.conftest import P100, RESOURCES, card_uuid, health, refusal
from tests.deviceplugin.mps.managednode import bound
from tests.deviceplugin.records import grant


def cleaned_up(rig) -> None:
    """`rm -rf /var/lib/cardwise` while it runs."""
    shutil.rmtree(rig.folder / "state")


def in_the_way(rig) -> None:
    """Nothing can be written to the folder. (Root may write to what is read-only for others.)"""
    shutil.rmtree(rig.folder / "state" / "grants")
    (rig.folder / "state" / "grants").write_text("")


def test_grants_come_back_when_somebody_has_cleaned_up(rig):
    slots = [rig.run(rig.bind(name, [(1, 1000)])) for name in "ab"]
    cleaned_up(rig)
    rig.settle()
    assert rig.held_on_disk(1) == 2000
    rig.stop()
    rig.start()
    assert [rig.agent.grants.slot_owner(slot).name for slot in slots] == ["a", "b"]
    assert rig.problems() == []


def test_a_container_starts_right_after_it(rig):
    cleaned_up(rig)
    rig.run(rig.bind("a", [(0, 1000)]))
    assert rig.held_on_disk(0) == 1000
    cleaned_up(rig)
    rig.run(rig.bind("b", [(0, 1000)]))
    rig.settle()
    assert rig.held_on_disk(0) == 2000


def test_what_was_freed_does_not_come_back(rig):
    pod = rig.bind("a", [(0, 1000)])
    rig.run(pod)
    cleaned_up(rig)
    rig.end(pod)
    rig.settle()
    assert rig.agent.grants.list_grants() == []
    assert list((rig.folder / "state" / "grants").iterdir()) == []


def test_a_grant_that_is_freed_while_it_is_missed_is_not_written(tmp_path):
    store = GrantStore(tmp_path / "grants")
    new_grant = grant()
    assert isinstance(store.add(new_grant, {"GPU-1": P100}), AddedGrant)
    (known,) = store.list_grants()
    store.drop_grants_of_pod(new_grant.pod_uid, store.epoch())
    store._restore_file(known)
    assert list((tmp_path / "grants").iterdir()) == []


def test_what_pods_hold_on_a_card_is_summed_once_a_pod_and_a_device_is_held_without_mib(tmp_path):
    store = GrantStore(tmp_path / "grants")
    two = tuple(CardShare(1, "GPU-1", mem, 0, P100) for mem in (100, 200))
    device = GrantedDevice("rdma", "RDMA-1")
    for new_grant in (
        grant("u1", *two),
        grant("u1", *two, container="side"),
        grant("u2", two[0], pod_devices=(device,)),
    ):
        assert isinstance(store.add(new_grant, {"GPU-1": P100}), AddedGrant)
    assert store.granted_mib_by_uuid() == {"GPU-1": 400, "RDMA-1": 0}


def test_the_folder_is_closed_to_others_from_the_first_start(tmp_path):
    GrantStore(tmp_path / "state" / "grants")
    assert (tmp_path / "state" / "grants").stat().st_mode & 0o777 == 0o700


def test_what_is_unreadable_unfinished_or_in_the_way_costs_no_other_grant(tmp_path):
    folder = tmp_path / "grants"
    store = GrantStore(folder)
    for new_grant in (grant("u1", container="b"), grant("u1", container="c"), grant("u2")):
        assert isinstance(store.add(new_grant, {"GPU-1": 3 * P100}), AddedGrant)
    known = store.list_grants()
    (folder / "0-stray").write_text("")
    (folder / "u1" / ".b.tmp").write_text("{")
    (folder / "u1" / "a.json").write_text("{")
    again = GrantStore(folder)
    assert again.list_grants() == known
    assert len(again.unreadable) == 2
    assert {path.name for path in folder.iterdir()} == {"u1", "u2"}
    assert {path.name for path in (folder / "u1").iterdir()} == {"b.json", "c.json"}


def _hide_folder(folder):
    (folder / "u1" / ".hidden").mkdir()


def _nest(folder):
    path = folder / "u1" / "main.json"
    path.write_text(path.read_text()[:-1] + ',"y":' + "[" * 100_000 + "]" * 100_000 + "}")


def _give_long_name(folder):
    (folder / ("u" * 250)).mkdir()
    (folder / ("u" * 250) / ("é" * 120)).write_text("{")


def _block_unreadable(folder):
    folder.with_name("grants-unreadable").write_text("")
    (folder / "u1" / "main.json").write_text("{")


@pytest.mark.parametrize("damage", [_hide_folder, _nest, _give_long_name, _block_unreadable])
def test_nothing_in_the_folder_keeps_the_plugin_from_starting(tmp_path, damage):
    folder = tmp_path / "grants"
    store = GrantStore(folder)
    for new_grant in (grant("u1"), grant("u2")):
        assert isinstance(store.add(new_grant, {"GPU-1": 3 * P100}), AddedGrant)
    damage(folder)
    again = GrantStore(folder)
    assert "u2" in {kept.pod_uid for kept in again.list_grants()}
    assert len(again.unreadable) == 1
    assert isinstance(again.add(grant("u1"), {"GPU-1": 3 * P100}), AddedGrant)
    assert {kept.pod_uid for kept in GrantStore(folder).list_grants()} == {"u1", "u2"}
    assert again.drop_grants_of_pod("u1", again.epoch())
    assert not (folder / "u1").exists()


def test_a_folder_among_the_grants_of_a_pod_does_not_keep_its_share(tmp_path):
    store = GrantStore(tmp_path / "grants")
    assert isinstance(store.add(grant(), {"GPU-1": P100}), AddedGrant)
    (tmp_path / "grants" / "u1" / "lost+found").mkdir()
    assert store.drop_grants_of_pod("u1", store.epoch())
    assert store.list_grants() == []


DEVICES = (GrantedDevice("rdma", "RDMA-0"),)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pod_devices": DEVICES}, "podDeviceKeys has 0 keys for 1 podDevices"),
        ({"pod_devices": DEVICES, "pod_device_keys": ("0", "1")}, "podDeviceKeys has 2 keys for 1 podDevices"),
        ({"pod_keys": ("0", "1")}, "podKeys has 2 keys for 1 podShares"),
        ({"pod_keys": ()}, "podKeys has 0 keys for 1 podShares"),
        ({"granted_ns": 2**63}, "grantedNs is 9223372036854775808, not a number from 0 to"),
        ({"pod_shares": (CardShare(1, "GPU-1", -1, 0, P100),)}, "mem is -1, not a number from 0 to"),
    ],
)
def test_a_grant_that_nobody_has_written_so_is_unreadable(tmp_path, changes, problem):
    """It was read, and each pass over the grants failed on it: no share was freed any more."""
    folder = tmp_path / "grants" / "u1"
    folder.mkdir(parents=True)
    written = grant(**changes)
    (folder / "main.json").write_bytes(msgspec.json.encode(written))
    store = GrantStore(tmp_path / "grants")
    assert store.list_grants() == []
    assert problem in store.unreadable[0]


def test_the_folder_that_comes_back_is_closed_to_others(tmp_path):
    store = GrantStore(tmp_path / "grants")
    assert isinstance(store.add(grant(), {"GPU-1": P100}), AddedGrant)
    shutil.rmtree(tmp_path / "grants")
    store.restore_files()
    assert [path.name for path in (tmp_path / "grants").iterdir()] == ["u1"]
    assert (tmp_path / "grants").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["a/b", "a..b", "..", "", "/etc"])
def test_no_name_leads_out_of_the_folder(tmp_path, name):
    store = GrantStore(tmp_path / "grants")
    for new_grant in (grant(uid=name), grant(container=name)):
        with pytest.raises(UnsafeName):
            store.add(new_grant, {"GPU-1": P100})
    assert list((tmp_path / "grants").iterdir()) == []


def test_a_grant_is_on_the_disk_itself_before_its_container_may_start(tmp_path, monkeypatch):
    """Not in the machine's memory only: after a power failure it would be a name without content, or no name."""
    store, synced = GrantStore(tmp_path / "grants"), []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").readlink().name))
    assert isinstance(store.add(grant(), {"GPU-1": P100}), AddedGrant)
    assert synced == ["grants", ".main.tmp", "u1"]


def test_what_cannot_be_written_is_told_in_each_place_and_heals(rig):
    slot = rig.run(rig.bind("a", [(1, 1000)]))
    in_the_way(rig)
    rig.settle()
    problem = f"grants cannot be written to {rig.folder}/state/grants: File exists"
    assert rig.problems() == [problem]
    assert health(rig) == ["Unhealthy", "Unhealthy"]
    assert rig.status(0)["reason"] == problem
    assert rig.events("StateUnwritable") == [
        f"{problem}: no container with a share can start on this node; free disk space, or make the folder writable"
    ]
    assert problem in refusal(lambda: rig.run(rig.bind("b", [(0, 1000)])))[1]
    assert rig.spec(slot), "what runs goes on"
    (rig.folder / "state" / "grants").unlink()
    rig.settle()
    assert rig.problems() == []
    assert health(rig) == ["Healthy", "Healthy"]
    assert len(rig.events("StateUnwritable")) == len(rig.events("StateWritable")) == 1
    assert rig.held_on_disk(1) == 1000
    rig.run(rig.bind("c", [(0, 1000)]))


def test_a_folder_for_cdi_that_cannot_be_written_is_told_likewise(rig):
    slot = rig.run(rig.bind("a", [(1, 1000)]))
    kept = (rig.folder / "cdi").rename(rig.folder / "kept")
    (rig.folder / "cdi").write_text("")
    rig.settle()
    problem = f"CDI specs cannot be written to {rig.folder}/cdi: File exists"
    assert rig.problems() == [problem]
    assert (health(rig), rig.status(0)["reason"]) == (["Unhealthy", "Unhealthy"], problem)
    assert len(rig.events("StateUnwritable")) == 1
    (rig.folder / "cdi").unlink()
    kept.rename(rig.folder / "cdi")
    rig.settle()
    assert (rig.problems(), health(rig)) == ([], ["Healthy", "Healthy"])
    assert rig.spec(slot)
    rig.run(rig.bind("b", [(0, 1000)]))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"f_bfree": 0}, "No space left on device"),
        ({"f_ffree": 0}, "No space left on device"),
        ({"f_files": 0, "f_ffree": 0}, None),
        ({"f_flag": os.ST_RDONLY}, "Read-only file system"),
    ],
)
def test_a_folder_for_cdi_without_room_is_none(monkeypatch, tmp_path, changes, problem):
    file_system = {"f_bfree": 1, "f_files": 10, "f_ffree": 1, "f_flag": 0} | changes
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**file_system))
    folder = tmp_path / "cdi"
    expected = f"CDI specs cannot be written to {folder}: {problem}" if problem is not None else None
    assert cdi.write_problem(folder) == expected


def test_a_full_disk_is_no_place_for_grants(rig):
    probe = rig.folder / "state" / ".grants.probe"
    probe.symlink_to("/dev/full")
    rig.settle()
    assert health(rig) == ["Unhealthy", "Unhealthy"]
    assert "No space left on device" in rig.status(1)["reason"]
    probe.unlink()
    rig.settle()
    assert health(rig) == ["Healthy", "Healthy"]


def test_cordons_are_remembered_all_the_same(rig):
    card = rig.card(1)
    card["spec"] |= {"unschedulable": True, "cordon": {"reason": "it smokes"}}
    rig.api.write_object(RESOURCES, card)
    rig.settle()
    cleaned_up(rig)
    rig.settle()
    assert card_uuid(1) in (rig.folder / "state" / "cordons.json").read_text()


def test_that_the_node_has_an_mps_manager_is_remembered_all_the_same(idle_rig):
    rig = idle_rig
    rig.mps_root.mkdir()
    (rig.mps_root / mps.LOCK_FILE).touch()
    rig.start()
    shutil.rmtree(rig.mps_root)
    cleaned_up(rig)
    assert "no MPS manager runs on this node" in refusal(lambda: rig.run(bound(rig), "c0"))[1]
    rig.settle()
    refusal(lambda: rig.run(bound(rig, "b"), "c0"))
    rig.stop()
    rig.start()
    assert "no MPS manager runs on this node" in refusal(lambda: rig.run(bound(rig, "c"), "c0"))[1]

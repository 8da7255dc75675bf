"""Whose a slot is, and the grant that its container gets by the annotations of its pod."""

import pytest

from cardwise.core.api import assignment as codec
from cardwise.core.api import names
from cardwise.core.api.assignment import CardShare
from cardwise.core.values.quantity import MiB
from cardwise.gpus.protocol import GpuCard
from deviceplugin.grants.granting import StartRefused, build_grant, check_cards
from deviceplugin.grants.grants import AddedGrant, CardFull, Grant, GrantStore
from deviceplugin.grants.prestart import identify_container
from deviceplugin.sources.kubelet import CheckpointContainer, Holders, PodResourcesContainer
from tests import build
from tests.deviceplugin.records import parse_pod, pod_view
from tests.theory import theory_of

A, B = PodResourcesContainer("default", "a", "main"), PodResourcesContainer("default", "b", "main")
UA, UB = CheckpointContainer("uid-a", "main"), CheckpointContainer("uid-b", "main")


class TestIdentify:
    def test_one_container_in_both(self):
        holders = Holders({"s1": [A], "s2": [B]}, {"s1": [UA], "s2": [UB]})
        assert identify_container(["s2"], holders, lambda _: None) == (B, "uid-b")

    @pytest.mark.parametrize(
        ("named", "known", "says"),
        [
            ({}, {"s1": [UA]}, "does not list a container"),
            ({"s1": [A]}, {}, "disagree"),
            ({"s1": [A]}, {"s1": [CheckpointContainer("uid-a", "other")]}, "disagree"),
            ({"s1": [A, B]}, {"s1": [UA, UB]}, "default/a (container main) and default/b"),
            ({"s1": [A]}, {"s1": [UA, UB]}, "disagree"),
        ],
        ids=["unlisted", "not in the checkpoint", "other container", "two pods", "two unknown uids"],
    )
    def test_refused(self, named, known, says):
        with pytest.raises(StartRefused, match=r"share slot s1|kubelet") as caught:
            identify_container(["s1"], Holders(named, known), lambda _: None)
        assert says in str(caught.value)

    def test_a_stale_entry_of_another_pod_does_not_matter(self):
        holders = Holders({"s1": [A]}, {"s1": [UB, UA]})
        assert identify_container(["s1"], holders, {"uid-b": "default/b", "uid-a": "default/a"}.get) == (A, "uid-a")

    def test_slots_of_two_containers_are_refused(self):
        holders = Holders({"s1": [A], "s2": [B]}, {"s1": [UA], "s2": [UB]})
        with pytest.raises(StartRefused, match="delete one of these pods"):
            identify_container(["s1", "s2"], holders, {"uid-b": "default/b", "uid-a": "default/a"}.get)

    def test_slots_of_one_container_that_two_pods_may_have_are_refused(self):
        holders = Holders({"s1": [A], "s2": [A]}, {"s1": [UA], "s2": [UB]})
        with pytest.raises(StartRefused, match="disagree"):
            identify_container(["s1", "s2"], holders, lambda _: None)


def test_a_sidecar_has_its_key_and_counts():
    sidecar = build.container("proxy", gpu_mem=100, share=1) | {"restartPolicy": "Always"}
    setup = build.container("setup")
    pod = parse_pod(build.pod("a", uid="u", init=[setup, sidecar], containers=[build.container("main", gpu_mem=200)]))
    assert pod.keys == {"proxy": "init-1", "main": "0"}
    assert pod.requests[names.GPU_MEM] == 300


def test_a_pod_of_gpushare_is_refused_in_its_name():
    pod = pod_view(annotations={names.IDX: "1", names.POD_MEM: "8138"})
    with pytest.raises(StartRefused, match="was not placed by the Cardwise extender"):
        build_grant(pod, "main", ["s001"])


def test_the_grant_is_what_the_annotations_order():
    shares = build.shares(8138, 1)
    pod = pod_view(annotations=codec.encode(codec.Assignment({"0": shares}), assume_time_ns=1))
    grant = build_grant(pod, "main", ["s001"])
    assert grant.shares == (shares[0],)
    assert (grant.pod_mem, grant.indices, grant.slots) == (8138, [1], ("s001",))
    assert (grant.isolation, grant.sm_percent) == ("", "")


def test_the_grant_knows_whose_each_share_of_the_pod_is():
    containers = {"0": build.shares(100, 1), "1": build.shares(50, 1)}
    pod = pod_view(annotations=codec.encode(codec.Assignment(containers), assume_time_ns=1))
    grant = build_grant(pod, "main", ["s001"])
    assert [(key, share.mem) for key, share in zip(grant.pod_keys, grant.pod_shares, strict=True)] == [
        ("0", 100),
        ("1", 50),
    ]


def test_a_card_smaller_than_its_shares_is_refused():
    (card,) = build.cards(1000)
    two = (CardShare(0, card.uuid, 500, 0, 1000), CardShare(0, card.uuid, 501, 0, 2000))
    here = {card.uuid: GpuCard(index=0, uuid=card.uuid, model="m", memory=MiB(1000), devices=())}
    check_cards(two[:1], here)
    with pytest.raises(StartRefused, match="has 1000 MiB, not the 1001 MiB"):
        check_cards(two, here)


def test_the_example_of_the_docstring(tmp_path):
    theory, total, of_a, of_b = theory_of("deviceplugin.grants.grants"), build.P100, (4096, 8192), 8192
    assert f"pod A has containers with {of_a[0]} and {of_a[1]} MiB on a card of {total} MiB" in theory

    def start(pod: str, container: int, *sizes: int) -> AddedGrant | CardFull:
        """Add the grant of one container of a pod whose containers have shares of these sizes."""
        shares = [(CardShare(0, "GPU-0", size, 0, total),) for size in sizes]
        assignment = codec.Assignment({str(key): share for key, share in enumerate(shares)})
        return store.add(Grant.for_pod(f"uid-{pod}", "default", pod, f"c{container}", assignment), {"GPU-0": total})

    store = GrantStore(tmp_path / "grants")
    start("a", 0, *of_a)
    assert f"the first container starts, A holds {store.granted_mib_by_uuid()['GPU-0']} MiB of the card" in theory
    assert f"So pod B with {of_b} MiB is refused even before A's second container starts" in theory
    assert isinstance(start("b", 0, of_b), CardFull)
    assert isinstance(start("b", 0, total - sum(of_a)), AddedGrant)
    assert isinstance(start("a", 1, *of_a), AddedGrant)

    # After a restore of etcd.
    again = Grant.for_pod("uid-a", "default", "a", "c0", codec.Assignment({"0": build.shares(100, 1)}))
    totals = {"GPU-0": total, "GPU-n1-1": total}
    assert "a grant with other cards is added only after the former grants were dropped" in theory
    assert not isinstance(store.add(again, totals), AddedGrant)
    store.drop_grants_of_pod("uid-a", store.epoch())
    assert isinstance(store.add(again, totals), AddedGrant)

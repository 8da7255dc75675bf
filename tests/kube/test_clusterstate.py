"""The state of a cluster: cards with classes, quotas with headroom, and unreadable objects."""

import json

import msgspec
import pytest

from cardwise.core.api.classes import Classifier, parse
from cardwise.core.api.quotas import QuotaEntry
from cardwise.kube import clusterstate, errors
from cardwise.kube.objects import extendedresources
from cardwise.kube.objects.extendedresources import ExtendedResource
from tests.build import gpu_quota, resource_class, resource_quota
from tests.cli.clusters import K80, K80_CLASS, card, device, lists, lists_with_devices, placed, waiting

SOME = {"matchLabels": {"model": "Tesla K80"}}


def test_a_card_knows_its_classes_and_their_highest_priority():
    api = lists(
        resourceclasses=[
            resource_class("low", selector=SOME, priority=-3),
            resource_class("high", selector={"matchLabels": {"node": "n1", "index": 0}}, priority=7),
            resource_class("other", selector={"matchLabels": {"model": "Tesla P100"}}, priority=9),
        ]
    )
    node = clusterstate.read_cluster_state(api.kube).ledger.node("n1")
    assert [(sorted(card.classes), card.priority) for card in node.cards] == [
        (["high", "low", K80_CLASS], 7),
        (["nvidia.tesla.p100", "other"], 9),
    ]


def test_selectors_match_user_labels_and_properties():
    classifier = Classifier(
        [
            parse(resource_class("rack", selector={"matchLabels": {"rack": "r1"}})),
            parse(resource_class("fast", selector={"matchExpressions": [_at_least("clock", "1000")]})),
        ]
    )
    raw = json.dumps(card("n1", 0, labels={"rack": "r1"}, properties={"clock": "1480"})).encode()
    parsed = extendedresources.card_of(msgspec.json.decode(raw, type=ExtendedResource), classifier)
    assert parsed.classes == {"rack", "fast", K80_CLASS}


def _at_least(key: str, bound: str) -> dict[str, object]:
    return {"key": key, "operator": "GtEq", "values": [bound]}


def test_card_without_a_classifier_has_no_class():
    raw = json.dumps(card("n1", 0)).encode()
    parsed = extendedresources.card_of(msgspec.json.decode(raw, type=ExtendedResource))
    assert (parsed.classes, parsed.priority, parsed.mem) == (frozenset(), 0, K80)


def test_devices_are_held_and_classified_like_cards():
    ledger = clusterstate.read_cluster_state(lists_with_devices().kube).ledger
    plain = clusterstate.read_cluster_state(lists(pods=lists_with_devices().objects("pods")).kube).ledger
    first, third = ledger.node("n1"), ledger.node("n3")
    assert [card.uuid for card in first.cards] == [card.uuid for card in plain.node("n1").cards]
    assert (first.free, third.cards, plain.node("n3")) == (plain.node("n1").free, [], None)
    assert [(device.uuid, device.healthy, sorted(device.classes)) for device in first.devices] == [
        ("rdma-n1-0", True, ["rdma"]),
        ("rdma-n1-1", True, ["fast", "rdma"]),
    ]
    assert set(first.device_holds) == {"rdma-n1-0", "rdma-n1-1"}
    assert not ledger.node("n2").devices[0].healthy
    assert (ledger.holding("n1/gone").phase_name, ledger.holding("n1/gone").assignment.shares()) == ("reported", [])
    assert ledger.violations() == []


def test_deleted_pod_is_one_holding_of_card_and_device():
    held = [{"podUID": "gone", "namespace": "a", "name": "gone", "memoryMiB": 64, "container": "0"}]
    on_card = card("n1", 0)
    on_card["status"]["reported"] = held
    api = lists(extendedresources=[on_card, device("n1", 0, reported=[held[0] | {"memoryMiB": 0}])], pods=[])
    (gone,) = clusterstate.read_cluster_state(api.kube).ledger.holdings()
    assert (gone.assignment.mem, [share.uuid for share in gone.assignment.non_gpu_devices()]) == (64, ["rdma-n1-0"])


def test_holding_under_a_former_node_name_counts_once():
    moved = card("n1", 0)
    moved["spec"]["node"] = "n9"
    before = clusterstate.read_cluster_state(lists().kube).ledger
    held = sum(before.node("n1").used[:1])
    assert held
    moved["status"]["reported"] = [
        {"podUID": holding.uid, "namespace": holding.namespace, "name": holding.name, "memoryMiB": 64, "container": "0"}
        for holding in before.holdings("n1")
        if moved["spec"]["uuid"] in holding.assignment.uuids()
    ]
    others = [
        manifest
        for manifest in lists().objects("extendedresources")
        if manifest["spec"]["uuid"] != moved["spec"]["uuid"]
    ]
    ledger = clusterstate.read_cluster_state(lists(extendedresources=[*others, moved]).kube).ledger
    assert ledger.node("n9").used == [held]


@pytest.mark.parametrize(("reported", "counts"), [(64, 2000), (5000, 5000)])
def test_larger_amount_of_two_bindings_counts(reported, counts):
    """The same count as in the extender."""
    on_card, pod = card("n1", 0), placed("team-a", "p", "n1", 0, 2000)
    uid, namespace, name = (pod["metadata"][key] for key in ("uid", "namespace", "name"))
    on_card["status"]["reported"] = [{"podUID": uid, "namespace": namespace, "name": name, "memoryMiB": reported}]
    ledger = clusterstate.read_cluster_state(lists(extendedresources=[on_card], pods=[pod]).kube).ledger
    assert ledger.node("n1").used == [counts]


def test_pending_pod_requests_devices_by_the_annotation():
    limits = {"cardwise.dev/rdma": "2", "cardwise.dev/share": "1", "cardwise.dev/place": "1"}
    ((_, _, pod_request),) = clusterstate.read_cluster_state(
        lists(pods=[waiting("a", "p", limits, devices="rdma")]).kube
    ).waiting
    assert (pod_request.containers, [(device.resource_class, device.count) for device in pod_request.devices]) == (
        (),
        [("rdma", 2)],
    )


def test_missing_extendedresources_crd_is_an_error():
    api = lists()
    api.lack("extendedresources")
    with pytest.raises(errors.NotFound):
        clusterstate.read_cluster_state(api.kube)


def test_unparsable_objects_are_problems_and_do_not_count():
    api = lists(
        resourceclasses=[resource_class("bad", selector={}), resource_class("k80", selector=SOME)],
        gpuquotas=[
            gpu_quota({"class": "k80"}, namespace="team-a"),
            gpu_quota({"class": "k80", "shares": 2}, namespace="team-a", name="ok"),
        ],
    )
    seen = clusterstate.read_cluster_state(api.kube)
    assert list(seen.classes) == ["k80"]
    assert [quota.name for quota in seen.quotas] == ["ok"]
    assert [problem.partition(": ")[0] for problem in seen.problems] == ["ResourceClass bad", "GPUQuota team-a/team"]
    assert "an empty selector would select every GPU" in seen.problems[0]


def test_headroom_of_each_quota_entry():
    (first, second) = [
        remaining for _, remaining in clusterstate.read_cluster_state(lists().kube).quota_headroom("team-a")
    ]
    assert first.entry == QuotaEntry(resource_class=K80_CLASS, shares=2, cards=1)
    assert (first.shares, first.memory, first.cards) == (0, None, 0)
    assert second.memory == 32768 - K80 - 2000
    assert clusterstate.read_cluster_state(lists().kube).quota_headroom("team-b") == []


def test_one_namespace_is_read_without_the_others_and_without_nodes():
    api = lists()
    api.forbid("nodes")
    seen = clusterstate.read_cluster_state(api.kube, namespace="team-b", addresses=False)
    assert {holding.namespace for holding in seen.ledger.holdings()} == {"team-b"}
    assert seen.quotas == []
    with pytest.raises(errors.Forbidden, match='cannot list resource "nodes"'):
        clusterstate.read_cluster_state(api.kube)


def test_a_pod_that_claims_devices_is_read_too():
    """`resources.claims` is a list, beside the maps of limits and requests."""
    pod = placed("team-a", "dra", "n1", 0, 100)
    pod["spec"]["containers"][0]["resources"] = {"claims": [{"name": "x"}], "limits": {"cpu": "1"}}
    assert len(clusterstate.read_cluster_state(lists(pods=[pod]).kube).ledger) == 1


def test_native_quotas_only_show_own_resources():
    quotas = [
        resource_quota({"pods": "3"}, namespace="a", name="plain"),
        resource_quota(
            {"requests.aliyun.com/gpu-mem": "5", "cpu": "2"}, namespace="a", used={"requests.aliyun.com/gpu-mem": "1"}
        ),
    ]
    (quota,) = clusterstate.list_native_quotas(lists(resourcequotas=quotas).kube, "a")
    assert (quota.name, quota.hard, quota.used) == (
        "gpus",
        {"requests.aliyun.com/gpu-mem": "5"},
        {"requests.aliyun.com/gpu-mem": "1"},
    )

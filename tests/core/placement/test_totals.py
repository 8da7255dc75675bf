"""The totals of each class and quota entry, the used part, and the namespaces that use it."""

from cardwise.core.api import classes
from cardwise.core.api.quotas import NO_CHARGE, Charge, GPUQuota, QuotaEntry
from cardwise.core.placement import totals
from tests.build import holding, resource_class
from tests.core import others
from tests.core.placement.placing import K80, V100, typed_ledger

CLASSES = {
    manifest["metadata"]["name"]: classes.parse(manifest)
    for manifest in (
        resource_class("k80"), resource_class("v100", model="Tesla V100"), resource_class("rdma", kind="rdma")
    )
}  # fmt: skip


def busy():
    """Two nodes with cards, of which pods hold some."""
    ledger = typed_ledger(n1=[K80, V100], n2=[K80 | {"healthy": False}])
    ledger.set_holding(holding("small", 100, 0))
    ledger.set_holding(holding("large", 300, 0))
    return ledger


def quota(*entries, name="q", namespace="default"):
    return GPUQuota(name=name, namespace=namespace, entries=entries)


def test_a_class_has_the_totals_of_its_cards_and_its_users():
    k80, v100 = totals.classes_of_cards(busy(), CLASSES)
    assert (k80.resource_class.name, v100.resource_class.name) == ("k80", "v100")
    assert k80.amounts == {
        "devices": 2,
        "healthyDevices": 1,
        "nodes": 2,
        "memoryMiB": 2 * 11441,
        "usedMiB": 400,
        "freeMiB": 11041,  # an unhealthy card has no free memory
    }
    assert k80.users == (("default", Charge(2, 400, 0)),)
    assert v100.users == ()
    assert totals.classes_of_cards(busy(), CLASSES, "v100") == [v100]


def test_devices_are_counted_and_only_those_that_a_pod_could_get_are_free():
    ledger = busy()
    ledger.set_other_devices("n1", [*others.devices(3), others.device(3, healthy=False)])
    ledger.set_holding(others.holding("of-n1", 0, 1))
    (rdma,) = totals.classes_of_devices(ledger, CLASSES)
    assert (rdma.devices, rdma.healthy, rdma.nodes, rdma.used, rdma.free) == (4, 3, 1, 2, 1)
    assert rdma.users == (("default", 2),)
    assert [holding.name for holding in totals.device_holders(ledger, ledger.node("n1"))[others.uuid(1)]] == ["of-n1"]


def test_an_entry_names_its_holders_the_largest_first_and_why_it_limits_nothing():
    standings = [
        quota(QuotaEntry(resource_class="k80"), QuotaEntry(resource_class="gone")),
        quota(QuotaEntry(), namespace="other"),
    ]
    k80, gone, other = totals.quota_entries(busy(), standings, {"k80": None, "gone": "no such class"}.__getitem__)
    assert (k80.used, k80.missing_class_reason) == (Charge(2, 400, 0), None)
    assert [(holder.name, part.memory) for holder, part in k80.holders] == [("large", 300), ("small", 100)]
    assert (gone.used, gone.holders, gone.missing_class_reason) == (NO_CHARGE, (), "no such class")
    assert (other.used, other.holders) == (NO_CHARGE, ())
    assert totals.quota_entries(busy(), standings, lambda _: None, "other") == [other]


def test_a_quota_that_cannot_be_read_limits_nothing():
    broken = {"metadata": {"namespace": "a", "name": "q"}, "spec": {"hard": [{"shares": -1}]}}
    good = {"metadata": {"namespace": "a", "name": "r"}, "spec": {"hard": [{"shares": 2}]}}
    (entry,) = totals.quota_entries_from_statuses([broken, good])
    assert (entry.quota.name, entry.entry.shares, entry.used, entry.holders) == ("r", 2, NO_CHARGE, ())

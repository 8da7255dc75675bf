"""What explain says: which GPUs and devices are free, who holds them, and why they are not for the request."""

from cardwise.core.api import request
from cardwise.core.api.mpsprofile import CardMps
from cardwise.core.api.quotas import QuotaEntry
from cardwise.core.preemption import explanation
from cardwise.core.values.refusals import Refusal
from tests.build import container, ledger_with_free, pod
from tests.core import others
from tests.core.placement.placing import K80, V100, of_class, quota, typed_ledger


def test_explain_shows_which_cards_the_request_cannot_use():
    ledger = typed_ledger(n1=[K80, V100, {"mem": 1000}])
    headroom = quota(ledger, QuotaEntry(resource_class="k80", shares=0))
    (view,) = explanation.explain(ledger, ["n1"], request.parse(pod(gpu_mem=17000)), "binpack", headroom)
    assert [(c.closed, c.missing_mib) for c in view.cards] == [("quota", 0), (None, 840), (None, 16000)]
    pod_request = request.parse(pod(containers=[of_class("k80", gpu_mem=1)]))
    (view,) = explanation.explain(ledger, ["n1"], pod_request, "binpack", headroom)
    assert view.refusal is Refusal.QUOTA
    assert [c.closed for c in view.cards] == ["quota", "type", "type"]
    assert [c.classes for c in view.cards] == [{"k80"}, {"v100", "fast"}, set()]
    (view,) = explanation.explain(ledger, ["n1"], pod_request, "binpack")
    assert (view.refusal, [c.closed for c in view.cards]) == (None, [None, "type", "type"])


def test_explain_shows_which_cards_mps_closes():
    ledger = typed_ledger(n1=[K80, K80 | {"mps": CardMps(ready=False)}])
    (view,) = explanation.explain(ledger, ["n1"], request.parse(pod(gpu_mem=1)), "binpack")
    assert [c.closed for c in view.cards] == [None, "mps"]


def test_explain_shows_the_missing_mib_and_the_holders_of_each_card():
    ledger = ledger_with_free(n1=[4069, 2000])
    (view,) = explanation.explain(ledger, ["n1"], request.parse(pod(gpu_mem=8138)), "binpack")
    assert view.refusal is Refusal.NO_MEMORY
    assert [(c.missing_mib, [h.name for h in c.holders]) for c in view.cards] == [(4069, ["n1-0"]), (6138, ["n1-1"])]


def test_explain_counts_the_free_devices_of_each_class_by_node():
    ledger = ledger_with_free(n1=[16000])
    ledger.set_other_devices("n1", [*others.devices(3), others.device(3, healthy=False), others.device(0, kind="nic")])
    ledger.set_holding(others.holding("u", 1, 2))
    pod_request = others.parse_request(others.wanting(rdma=1), others.wanting(rdma=1, nic=1))
    view, _ = explanation.explain(ledger, ["n1", "n2"], pod_request, "binpack")
    assert (view.refusal, view.cards) == (Refusal.NO_DEVICE, ())
    assert [
        (d.resource_class, d.requested, d.free, d.healthy, d.total, [h.name for h in d.holders]) for d in view.devices
    ] == [
        ("rdma", 2, 1, 3, 4, ["u"]),
        ("nic", 1, 1, 1, 1, []),
    ]
    beside = others.parse_request(others.wanting(container(gpu_mem=1), rdma=1))
    (fits,) = explanation.explain(ledger, ["n1"], beside, "binpack")
    assert (fits.refusal, [card.free for card in fits.cards], [d.free for d in fits.devices]) == (None, [16000], [1])


def test_the_most_that_could_be_asked_for_runs_at_once():
    ledger = ledger_with_free(n1=[4069, 3000], n2=[2000, 8000], n3=[16276])
    whole = request.parse(pod(gpu_count=1))
    smaller_request = explanation.find_smaller_request(
        ledger, ["n1", "n2"], request.parse(pod(gpu_mem=10000)), "binpack"
    )
    assert smaller_request == explanation.SmallerRequest(8000, "n2", (1,))
    split = request.parse(pod(gpu_mem=20000, gpu_count=2))
    assert explanation.find_smaller_request(ledger, ["n1", "n2"], split, "binpack") == explanation.SmallerRequest(
        6000, "n1", (0, 1)
    )
    assert explanation.find_smaller_request(ledger, ["n1", "n2"], whole, "binpack") is None
    assert explanation.find_smaller_request(ledger, ["n3"], request.parse(pod(gpu_mem=100)), "binpack") is None, (
        "it fits as it is"
    )


def test_a_pod_in_the_way_of_several_requests_counts_once_and_the_ledger_is_unchanged():
    ledger = ledger_with_free(n1=[100], n2=[200])
    pod_request = request.parse(pod(gpu_mem=8000))
    gone = explanation.pods_in_the_way(ledger, ["n1", "n2"], [pod_request] * 4, "binpack")
    assert sorted(holding.uid for holding in gone) == ["n1-0", "n2-0"]
    assert len(explanation.pods_in_the_way(ledger, ["n1", "n2"], [pod_request] * 2, "binpack")) == 1
    assert explanation.pods_in_the_way(ledger, ["n1", "n2"], [pod_request] * 5, "binpack") is None
    assert sorted(holding.uid for holding in ledger.holdings()) == ["n1-0", "n2-0"]
    assert ledger.violations() == []

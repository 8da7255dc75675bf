from dataclasses import replace

import msgspec
import pytest

from cardwise.cli.cluster import published
from cardwise.cli.cluster.engine import ClusterEngine
from cardwise.cli.cluster.published import PublishedPolicy
from cardwise.cli.explanation import sentences
from cardwise.cli.explanation.blockers import PodContext
from cardwise.core.api import assignment, names, quotas, request
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.request import Load
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.scored.shapes import RequestSize
from cardwise.core.placement.scored.workload import Workload
from cardwise.core.values.refusals import Refusal
from cardwise.kube import clusterstate
from cardwise.kube.clusterstate import ClusterState
from cardwise.kube.objects.extendedresources import ExtendedResource
from tests.build import (
    asking,
    automatic_class,
    cards,
    container,
    extended_resource,
    gpu_quota,
    holding,
    ledger_with_free,
    pod,
    resource_class,
    shares,
)
from tests.cli.clusters import K80_CLASS, card, lists, placed, waiting


def test_a_waiting_pod_hears_which_card_is_short_by_how_much():
    seen = ClusterState(ledger=ledger_with_free(n1=[4069, 16276], n2=[100]))
    seen.ledger.set_holding(holding("big", 16276, 1))
    text = sentences.explain_pod(asking("p", gpu_mem=8138), seen)
    assert "8138 MiB (container main)" in text
    assert "n1: Insufficient GPU Memory in one device" in text
    assert "4069 of 16276 MiB free, 4069 MiB short, held by default/n1-0" in text


def test_a_pod_whose_requests_fit_alone_only_hears_what_helps():
    whole, share = container("whole", whole_gpu=1, share=1), container("both", gpu_mem=8000, share=1)
    split = {names.GPU_COUNTS: "both=2"}
    seen = ClusterState(ledger=ledger_with_free(n1=[16276, 16276]))
    text = sentences.explain_pod(pod("p", containers=[whole, share], annotations=split), seen)
    assert "  n1: The node's GPUs are too few or too small for all requests of the pod together\n" in text
    assert text.endswith(
        "It would run if one of these were true:\n  - its containers requested less, or were separate pods\n"
    )
    seen.ledger.set_holding(holding("other", 10000, 0))
    text = sentences.explain_pod(pod("p", containers=[whole, container("small", gpu_mem=8000, share=1)]), seen)
    assert "  n1: The node's GPUs fit each request of the pod, but not all of them together\n" in text
    assert text.endswith("  - these ended (GPUs 0, 1 of n1, 1724 MiB short): default/other (10000 MiB)\n")


def test_of_a_split_share_each_card_is_told_its_part():
    seen = ClusterState(ledger=ledger_with_free(n1=[16276, 16276]))
    of_two = Assignment({"0": tuple(CardShare(i, f"GPU-n1-{i}", 4096, 0, 16276) for i in (0, 1))})
    seen.ledger.set_holding(Holding("split", "team", "split", "n1", of_two))
    text = sentences.explain_pod(asking("p", gpu_mem=16000), seen)
    assert text.count("12180 of 16276 MiB free, 3820 MiB short, held by team/split (4096 MiB)") == 2


def test_a_pod_that_would_fit_hears_where():
    text = sentences.explain_pod(asking("p", gpu_mem=100), ClusterState(ledger=ledger_with_free(n1=[4069], n2=[16276])))
    assert "free on n1, n2 (best first, priced orders them as binpack would)" in text


def test_a_placed_pod_hears_its_card_and_its_neighbours():
    seen = ClusterState(ledger=ledger_with_free(n1=[4069]))
    annotations = assignment.encode(Assignment({"0": shares(4069, 0)}), assume_time_ns=1)
    there = pod("p", gpu_mem=4069, annotations=annotations, uid="u")
    there["spec"]["nodeName"] = "n1"
    text = sentences.explain_pod(there, seen)
    assert "4069 of 16276 MiB (0.2500) of GPU 0 GPU-n1-0, beside default/n1-0 (12207 MiB)" in text
    assert "The node has not given it the share yet:" in text


@pytest.mark.parametrize(
    ("memory", "compute", "core", "ending"),
    [
        ("advisory", "none", 25, "; nothing limits the share, because no manager\n"),
        ("mps", "mps", 0, "; MPS limits its memory\n"),
        ("mps", "mps", 25, "; MPS limits its memory and its SMs to 25 %\n"),
        ("kernel", "none", 25, "; the driver limits its memory, and nothing limits its SMs\n"),
        ("kernel", "none", 0, "; the driver limits its memory\n"),
    ],
)
def test_a_placed_pod_learns_what_limits_its_share(memory, compute, core, ending):
    seen = ClusterState(ledger=ledger_with_free(n1=[16276]))
    status = {"isolation": {"memory": memory, "memoryReason": "no manager", "compute": compute, "computeReason": ""}}
    spec = {"node": "n1", "index": 0, "uuid": "GPU-n1-0"}
    seen.resources = [msgspec.convert({"metadata": {}, "spec": spec, "status": status}, ExtendedResource)]
    share = CardShare(0, "GPU-n1-0", 4069, core, 16276)
    annotations = assignment.encode(Assignment({"0": (share,)}), assume_time_ns=1)
    there = pod("p", gpu_mem=4069, annotations=annotations, uid="u")
    there["spec"]["nodeName"] = "n1"
    assert f"of GPU 0 GPU-n1-0, alone{ending}" in sentences.explain_pod(there, seen)
    whole = assignment.encode(Assignment({"0": (replace(share, whole=True),)}), assume_time_ns=1)
    there["metadata"]["annotations"] = whole
    assert "limits" not in sentences.explain_pod(there, seen)


def test_neighbours_are_told_by_the_uuid_of_the_card_as_its_index_may_have_changed():
    seen = ClusterState(ledger=ledger_with_free(n1=[4069, 16000]))
    before = Assignment({"0": (CardShare(1, "GPU-n1-0", 4069, 0, 16276),)})
    seen.ledger.set_holding(Holding("old", "default", "old", "n1", before))
    there = pod("p", gpu_mem=4069, annotations=assignment.encode(before, assume_time_ns=1), uid="u")
    there["spec"]["nodeName"] = "n1"
    text = sentences.explain_pod(there, seen)
    assert "of GPU 1 GPU-n1-0, beside default/n1-0 (12207 MiB), default/old (4069 MiB)\n" in text
    seen.ledger.set_cards("n1", cards(16276, 16276)[1:])
    gone = "; this GPU is not on the node any more\n"
    assert f"GPU-n1-0, beside default/n1-0 (12207 MiB), default/old (4069 MiB){gone}" in sentences.explain_pod(
        there, seen
    )


def test_what_a_pod_that_has_gone_holds_is_said_so():
    api = lists(
        pods=[waiting("team-a", "p", {names.GPU_MEM: "20000", names.SHARE: "1", names.FILTER_CALL_RESOURCE: "1"})]
    )
    held = {"podUID": "x", "namespace": "team-b", "name": "cr", "memoryMiB": 1000, "container": "0"}
    api.change("extendedresources", "gpu-n1-0", status={"reported": [held]})
    (stored_pod,) = api.objects("pods")
    assert ", held by team-b/cr (1000 MiB, its pod is gone)\n" in sentences.explain_pod(
        stored_pod, clusterstate.read_cluster_state(api.kube, addresses=False)
    )


def test_a_placed_pod_hears_its_containers_by_their_names():
    annotations = assignment.encode(Assignment({"0": shares(100, 0), "init-0": shares(200, 0)}), assume_time_ns=1)
    beside = container(gpu_mem=200) | {"name": "beside", "restartPolicy": "Always"}
    placed = pod("p", gpu_mem=100, init=[beside], annotations=annotations, uid="u")
    placed["spec"]["nodeName"] = "n1"
    text = sentences.explain_pod(placed, ClusterState(ledger=ledger_with_free(n1=[4069])))
    assert "  container main: 100 of " in text
    assert "  container beside: 200 of " in text


def test_pods_that_can_never_run_or_are_not_ours():
    assert "can never be placed" in sentences.explain_pod(pod("p", gpu_mem=0), ClusterState())
    assert "requests no GPU" in sentences.explain_pod(pod("p", containers=[{"name": "x"}]), ClusterState())
    bound = asking("p", gpu_mem=5)
    bound["spec"]["nodeName"] = "n1"
    assert "not bound by the Cardwise extender" in sentences.explain_pod(bound, ClusterState())
    bound = pod("p", gpu_mem=5)
    bound["spec"]["nodeName"] = "n1"
    assert "is on node n1 without a GPU of Cardwise: the webhook has not" in sentences.explain_pod(
        bound, ClusterState()
    )
    assert "No node has a GPU" in sentences.explain_pod(asking("p", gpu_mem=5), ClusterState())
    unseen = sentences.explain_pod(pod("p", gpu_mem=5), ClusterState())
    assert "can never be placed" in unseen
    assert "the pod was not rewritten by the Cardwise webhook" in unseen


def test_what_runs_is_explained_although_its_policy_was_changed_to_nonsense():
    annotations = assignment.encode(Assignment({"0": shares(4069, 0)}), assume_time_ns=1)
    placed = pod("p", gpu_mem=4069, annotations=annotations | {"cardwise.dev/policy": "garbage"}, uid="u")
    placed["spec"]["nodeName"] = "n1"
    assert "pod default/p is on node n1" in sentences.explain_pod(
        placed, ClusterState(ledger=ledger_with_free(n1=[4069]))
    )
    gone = sentences.explain_pod(placed, ClusterState(ledger=ledger_with_free(n1=[])))
    assert "this GPU is not on the node any more" in gone
    on_n2 = msgspec.convert(
        extended_resource(0) | {"spec": extended_resource(0)["spec"] | {"node": "n2"}}, ExtendedResource
    )
    moved = sentences.explain_pod(placed, ClusterState(ledger=ledger_with_free(n1=[]), resources=[on_n2]))
    assert "; this GPU is on node n2 now" in moved


def test_what_has_failed_says_why():
    failed = pod("p", gpu_mem=4069)
    failed["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no healthy devices"}
    text = sentences.explain_pod(failed, ClusterState())
    assert text.startswith(
        "pod default/p has ended (Failed) and holds no GPU.\nIts status: UnexpectedAdmissionError: no healthy devices\n"
    )
    advice = text.splitlines()[2:]
    assert "after a reboot of the node" in advice[0]
    assert "`kubectl get pod -n default p -o yaml > p.yaml && kubectl replace --force -f p.yaml` saves it" in advice[0]
    assert "Drain a node before a reboot" in advice[1]
    assert "podFailurePolicy" in advice[1]
    ended = {"name": "main", "state": {"terminated": {"exitCode": 4, "reason": "Error"}}}
    failed["status"] = {"phase": "Failed", "containerStatuses": [ended]}
    assert sentences.explain_pod(failed, ClusterState()).endswith("  container main ended with exit code 4 (Error)\n")


def typed(limits: dict[str, str], namespace: str = "team-a") -> dict[str, object]:
    return waiting(namespace, "p", limits | {"cardwise.dev/share": "1"})


def test_a_typed_pod_hears_which_cards_are_of_its_class():
    api = lists(gpuquotas=[])
    text = sentences.explain_pod(
        typed({f"cardwise.dev/{K80_CLASS}": "2", "cardwise.dev/gpu": "2"}), clusterstate.read_cluster_state(api.kube)
    )
    assert f"requests 2 whole GPUs of class {K80_CLASS} (container main)" in text
    assert f"Of class {K80_CLASS}: 3 GPUs on n1 (1), n2 (2), 1 of them unhealthy." in text
    assert "GPU 1 Tesla P100: 12207 of 16276 MiB free, not in the class" in text
    assert "GPUQuota" not in text


def test_nodes_without_the_type_are_one_line():
    text = sentences.explain_pod(
        typed({"cardwise.dev/big": "1", "aliyun.com/gpu-mem": "16000"}), clusterstate.read_cluster_state(lists().kube)
    )
    assert "  n2: The node has no GPU of the requested type\n" in text
    assert "Tesla K80: 0 of" not in text
    assert "3793 MiB short" in text


def test_a_class_that_is_not_there_is_named_with_those_that_are_and_a_broken_one_with_its_mistake():
    limits = {"cardwise.dev/k80": "1", "cardwise.dev/gpu": "1"}
    assert "There is no ResourceClass k80; available: big, nvidia.tesla.k80." in sentences.explain_pod(
        typed(limits), clusterstate.read_cluster_state(lists().kube)
    )
    broken = lists(resourceclasses=[resource_class("k80", selector={})])
    assert "ResourceClass k80: spec.selector: an empty selector" in sentences.explain_pod(
        typed(limits), clusterstate.read_cluster_state(broken.kube)
    )
    empty = lists(resourceclasses=[resource_class("k80", selector={"matchLabels": {"model": "none"}})])
    assert "No GPU matches class k80: see its selector" in sentences.explain_pod(
        typed(limits), clusterstate.read_cluster_state(empty.kube)
    )


def test_a_type_whose_cards_are_all_gone_says_that_the_pod_waits_for_a_node():
    scaled_to_zero = lists(resourceclasses=[automatic_class("NVIDIA L4")])
    text = sentences.explain_pod(
        typed({"cardwise.dev/nvidia.l4": "1", "cardwise.dev/gpu": "1"}),
        clusterstate.read_cluster_state(scaled_to_zero.kube),
    )
    assert "The cluster has no GPU of class nvidia.l4 now: the pod waits until a node brings one." in text


def test_quotas_in_the_way_say_hard_used_and_asked():
    limits = {f"cardwise.dev/{K80_CLASS}": "1", "cardwise.dev/gpu": "1"}
    text = sentences.explain_pod(typed(limits), clusterstate.read_cluster_state(lists().kube))
    assert (
        f"GPUQuota team does not allow this on {K80_CLASS}: 2 of 2 shares used, 1 requested, "
        "1 of 1 whole GPUs used, 1 requested.\n" in text
    )
    assert "The namespace's GPUQuota leaves no capacity" not in text.partition("n1:")[0]
    assert "GPUQuota" not in sentences.explain_pod(
        typed(limits, "team-b"), clusterstate.read_cluster_state(lists().kube)
    )


def test_who_waits_for_mps_is_told_how_each_card_is_and_who_holds_it():
    down = card("n1", 0)
    down["status"]["mps"] = {"mode": "card", "state": "Down", "reason": "it does not start", "multiUser": True}
    alone = card("n1", 1)
    alone["status"]["mps"] = {"mode": "card", "state": "Ready", "multiUser": False}
    holder = placed("team-b", "train", "n1", 1, 1000)
    holder["spec"]["securityContext"] = {"runAsUser": 1000}
    cluster_state = clusterstate.read_cluster_state(lists(extendedresources=[down, alone], pods=[holder]).kube)
    pod = typed({"aliyun.com/gpu-mem": "100"})
    pod["spec"]["containers"][0]["securityContext"] = {"runAsUser": 0}
    text = sentences.explain_pod(pod, cluster_state)
    assert "n1: MPS on the suitable GPUs serves one Unix user at a time, and pods of another user run there" in text
    assert "GPU 0 Tesla K80: 11441 of 11441 MiB free, closed by MPS (Down: it does not start)\n" in text
    assert "10441 of 11441 MiB free, closed by MPS (Ready, one user at a time), held by team-b/train (1000 MiB)" in text
    pod["metadata"]["annotations"] = {names.ISOLATION: "none"}
    assert "used by pods that differ in whether they use MPS" in sentences.explain_pod(pod, cluster_state)


def test_share_with_is_named_at_the_gpus_that_it_closes_and_at_the_pod():
    holder = placed("team-b", "train", "n1", 0, 1000)
    holder["metadata"]["annotations"][names.SHARE_WITH] = "namespace"
    cluster_state = clusterstate.read_cluster_state(lists(extendedresources=[card("n1", 0)], pods=[holder]).kube)
    pod = typed({"aliyun.com/gpu-mem": "100"})
    text = sentences.explain_pod(pod, cluster_state)
    assert f"n1: {Refusal.WITHIN_NAMESPACE.text}" in text
    assert "10441 of 11441 MiB free, closed by share-with, held by team-b/train (1000 MiB)" in text
    holder["spec"]["containers"][0]["resources"] = {"limits": {"aliyun.com/gpu-mem": "1000"}}
    assert "; only pods of its namespace share this GPU" in sentences.explain_pod(holder, cluster_state)


def test_who_requires_mps_is_told_why_it_cannot_run():
    cannot = card("n1", 0)
    cannot["status"]["mps"] = {"mode": "card", "state": "Unavailable", "reason": "driver 470: upgrade it"}
    cluster_state = clusterstate.read_cluster_state(lists(extendedresources=[cannot]).kube)
    pod = typed({"aliyun.com/gpu-mem": "100"})
    assert "closed by MPS" not in sentences.explain_pod(pod, cluster_state)
    pod["metadata"]["annotations"] = {names.ISOLATION: "mps"}
    text = sentences.explain_pod(pod, cluster_state)
    assert f"n1: {Refusal.MPS_MISSING.text}" in text
    assert (
        "free, its memory tier is unknown, the pod demands mps (Unavailable: driver 470: upgrade it), held by" in text
    )


def test_a_pod_that_demands_the_drivers_limit_reads_the_tier_of_each_gpu_and_the_reason():
    served = card("n1", 0)
    served["status"]["mps"] = {"mode": "card", "state": "Ready", "multiUser": True}
    served["status"]["isolation"] = {
        "memory": "mps",
        "memoryReason": "limits by the driver need driver 615 or later; this is 580.95.05",
        "compute": "mps",
    }
    cluster_state = clusterstate.read_cluster_state(lists(extendedresources=[served]).kube)
    pod = typed({"aliyun.com/gpu-mem": "100"})
    pod["metadata"] |= {"namespace": "team-b", "annotations": {names.ISOLATION: "kernel"}}
    text = sentences.explain_pod(pod, cluster_state)
    assert f"n1: {Refusal.KERNEL_MISSING.text}" in text
    assert (
        "its memory tier is mps, the pod demands kernel (limits by the driver need driver 615 or later; this is "
        "580.95.05)" in text
    )
    assert "  - it had cardwise.dev/isolation: mps and so demanded less than kernel: that fits now, on n1" in text
    served["status"]["isolation"]["memory"] = "kernel"
    cluster_state = clusterstate.read_cluster_state(lists(extendedresources=[served]).kube)
    assert Refusal.KERNEL_MISSING.text not in sentences.explain_pod(pod, cluster_state)


def test_a_pod_that_names_no_type_is_steered_and_told_so():
    text = sentences.explain_pod(typed({"aliyun.com/gpu-mem": "100"}), clusterstate.read_cluster_state(lists().kube))
    assert (
        f"GPUQuota team does not allow this on {K80_CLASS}: 2 of 2 shares used, 1 requested; GPUs that it does not "
        "limit are still available." in text
    )
    assert "GPUs that fit are free on n1" in text
    everything = lists(gpuquotas=[gpu_quota({"memoryMiB": 13500}, namespace="team-a")])
    text = sentences.explain_pod(typed({"aliyun.com/gpu-mem": "100"}), clusterstate.read_cluster_state(everything.kube))
    assert "GPUQuota team does not allow this on all GPUs: 13441 of 13500 MiB used, 100 requested." in text
    assert "n1: The namespace's GPUQuota leaves no capacity on the suitable GPUs" in text
    assert "GPU 0 Tesla K80: 8441 of 11441 MiB free, closed by quota" in text


# Under which policy, and what would help.


def waiting_for(mem: int, **annotations: str) -> dict[str, object]:
    pod = waiting("team-b", "p", {"aliyun.com/gpu-mem": str(mem), "cardwise.dev/share": "1"})
    pod["metadata"]["annotations"] = annotations
    return pod


def engine(seen: ClusterState, loads: dict[str, Load], *mems: int) -> ClusterEngine:
    """One that has learned that shares of these sizes come."""
    workload = Workload()
    for mem in mems:
        workload.count_arrival(RequestSize(1, mem, 0, "", 0, 0))
    return ClusterEngine(seen.ledger, loads, workload.dump())


def test_the_policy_is_the_pods_own_else_the_extenders():
    published_policy = PublishedPolicy("spread")
    assert published.policy_of_pod(waiting_for(1), published_policy) == "spread"
    assert published.policy_of_pod(waiting_for(1, **{names.POLICY: "priced"}), published_policy) == "priced"
    assert published.policy_of_pod(waiting_for(1, **{names.POLICY: "nonsense"}), published_policy) == "spread"
    seen = ClusterState(ledger=ledger_with_free(n1=[4069], n2=[16276]))
    assert "free on n2, n1 (best first, spread)" in sentences.explain_pod(
        waiting_for(100), seen, settings=published_policy
    )
    assert "free on n1, n2 (best first, priced orders them as binpack would)" in sentences.explain_pod(
        waiting_for(100), seen
    )
    unread = PublishedPolicy(note="you may not read it")
    assert "(best first, as binpack would; the data that priced has learned is unknown here)" in sentences.explain_pod(
        waiting_for(100), seen, settings=unread
    )


def test_a_policy_that_compares_all_nodes_is_asked_as_the_extender_asks_it():
    seen = ClusterState(ledger=ledger_with_free(n1=[8138], n2=[8638], n3=[16276]))
    pod = waiting_for(500, **{names.POLICY: "priced"})
    # Binpack takes the fullest card, n1; but shares of 8138 come, and on n2 one still fits then.
    text = sentences.explain_pod(pod, seen, engine=engine(seen, {}, 8138))
    assert "free on n2, n1, n3 (best first, priced)" in text
    assert "free on n1, n2, n3 (best first, priced orders them as binpack would)" in sentences.explain_pod(
        pod, seen, engine=engine(seen, {})
    )


def test_with_a_spoilt_workload_it_is_as_if_nothing_was_learned_and_says_so():
    seen = ClusterState(ledger=ledger_with_free(n1=[8000], n2=[8500]))
    pod = waiting_for(500, **{names.POLICY: "priced"})
    spoilt = ClusterEngine(seen.ledger, {}, '{"version":1,"requests":[[1,8000,0,"",0,0,NaN]]}')
    assert "cannot be read ([1, 8000, 0, '', 0, 0] cannot have come nan times)" in spoilt.note
    text = sentences.explain_pod(pod, seen, engine=spoilt)
    assert "free on n1, n2 (best first, priced orders them as binpack would)" in text


def test_a_node_with_the_card_and_without_the_cpu_is_told():
    seen = ClusterState(ledger=ledger_with_free(n1=[8000], n2=[8500]))
    pod = waiting_for(500, **{names.POLICY: "priced"})
    pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "2"}
    text = sentences.explain_pod(pod, seen, engine=engine(seen, {"n2": Load(1000, 1 << 40, 10)}, 8000))
    assert "Nodes with enough free GPU memory, but without the cpu and memory that the pod requests: n2.\n" in text
    assert "free on n1 (best first, priced)" in text


def test_who_could_be_asked_are_the_fewest_of_one_card():
    seen = ClusterState(ledger=ledger_with_free(n1=[4069, 1000], n2=[16276 - 12000]))
    seen.ledger.set_holding(holding("small", 4276, 0, node="n2"))
    text = sentences.explain_pod(waiting_for(8138), seen)
    assert text.endswith(
        "It would run if one of these were true:\n"
        "  - it requested at most 4069 MiB: that fits now, on GPU 0 of n1\n"
        "  - these ended (GPU 0 of n2, 8138 MiB short): default/n2-0 (12000 MiB)\n"
    )
    assert "would run if" not in sentences.explain_pod(waiting_for(4000), seen)


def test_cards_that_are_sick_or_cordoned_are_told_with_the_remedy():
    sick, cordoned = card("n1", 0, health="Unhealthy"), card("n1", 1)
    cordoned["spec"]["unschedulable"] = True
    seen = clusterstate.read_cluster_state(lists(extendedresources=[sick, cordoned], pods=[], gpuquotas=[]).kube)
    text = sentences.explain_pod(waiting_for(4000), seen)
    assert "  - GPU 0 of n1 became healthy: it has 11441 MiB free\n" in text
    assert "  - GPU 1 of n1 were uncordoned (`cardwise uncordon n1/1`)\n" in text


def test_a_quota_names_who_holds_most_of_it():
    everything = lists(gpuquotas=[gpu_quota({"memoryMiB": 13500}, namespace="team-a")])
    text = sentences.explain_pod(typed({"aliyun.com/gpu-mem": "100"}), clusterstate.read_cluster_state(everything.kube))
    assert (
        "  - GPUQuota team left capacity on all GPUs; it is held by team-a/train (11441 MiB), team-a/notebook (2000 "
        "MiB)\n" in text
    )


def test_what_no_card_can_hold_is_told_the_most_that_one_can():
    text = sentences.explain_pod(waiting_for(20_000), ClusterState(ledger=ledger_with_free(n1=[16276])))
    assert "  - it requested at most 16276 MiB of a GPU, the size of the largest GPU that it may use; more" in text
    split = sentences.explain_pod(
        pod("p", gpu_mem=24_000, gpu_count=2), ClusterState(ledger=ledger_with_free(n1=[16276]))
    )
    assert "the biggest" not in split, "it requests less than that"


# What keeps a pod from its cards before cards matter, and what is cheaper than to end somebody.


def context(*nodes: dict[str, object], **fields: object) -> PodContext:
    return PodContext(nodes or ({"metadata": {"name": "n1"}},), **fields)


def labelled(name: str, **labels: str) -> dict[str, object]:
    return {"metadata": {"name": name, "labels": labels}, "status": {"capacity": {"nvidia.com/mig-1g.5gb": "7"}}}


FREE = {"n1": [16276], "n2": [16276]}


def heard(spec: dict[str, object], beside: PodContext | None = None, refusal: str = "") -> str:
    pod = waiting_for(4000)
    pod["spec"] |= spec
    pod["status"] = {"conditions": [{"type": "PodScheduled", "message": refusal}]} if refusal else {}
    seen = ClusterState(ledger=ledger_with_free(**FREE))
    return sentences.explain_pod(pod, seen, context=beside or context(labelled("n1"), labelled("n2")))


def test_of_a_pod_that_nobody_places_cards_are_not_called_free():
    hub = heard({"schedulerName": "jupyterhub-user-scheduler"})
    assert "Its scheduler is jupyterhub-user-scheduler" in hub
    kueue = heard({"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]})
    assert "Kueue has not admitted it yet" in kueue
    assert "`kubectl get workloads -n team-b`" in kueue
    other = heard({"schedulingGates": [{"name": "acme.example/wait"}]})
    assert "its scheduling gate acme.example/wait is removed" in other
    for text in (hub, kueue, other):
        assert "that fit are free" not in text
    ganged = heard(
        {"schedulingGates": [{"name": names.GANG}]}, refusal="Scheduling is blocked due to non-empty scheduling gates"
    )
    assert "that fit are free on n1, n2" in ganged
    assert "; it waits for its gang.\n" in ganged


def test_a_scheduler_of_the_chart_places_pods_only_while_it_is_there():
    mine = {"schedulerName": names.SCHEDULER}
    gone = heard(mine, context(schedulers=frozenset()), refusal=Refusal.NO_MEMORY.text)
    assert "Its scheduler cardwise-scheduler no longer exists" in gone
    assert "that fit are free" not in gone
    renamed = heard(mine, context(schedulers=frozenset({"gpus"})))
    assert "no longer exists, so nothing places the pod:" in renamed
    assert "Its scheduler" not in heard({"schedulerName": "gpus"}, context(schedulers=frozenset({"gpus"})))
    for known in (None, frozenset({names.SCHEDULER})):  # None: it may not be read
        assert "Its scheduler" not in heard(mine, context(schedulers=known))


def test_what_else_kube_scheduler_says_is_what_it_waits_for():
    assert "check cpu and memory" in heard(
        {}, refusal="0/2 nodes are available: 2 Insufficient GPU Memory in one device."
    )
    assert "check cpu and memory" in heard({}, refusal="0/2 nodes are available: 2 Insufficient aliyun.com/gpu-mem.")
    text = heard({}, refusal='0/2 nodes are available: persistentvolumeclaim "data" not found.')
    assert "; kube-scheduler's message above says what it waits for.\n" in text
    text = heard({}, refusal="0/2 nodes are available: 2 Insufficient cardwise.dev/share.")
    assert "; their device plugins offer no cardwise.dev/share now: ask your administrator to run" in text
    text = heard({}, refusal='Post "https://10.96.0.50:12345/gpushare-scheduler/filter": connect: connection refused')
    assert "; no Cardwise extender answers kube-scheduler: ask your administrator to run `cardwise doctor`.\n" in text
    limits = {"aliyun.com/gpu-mem": "4000", "aliyun.com/gpu-cores": "20", "cardwise.dev/share": "1"}
    misspelt = waiting("team-b", "p", limits)
    text = sentences.explain_pod(
        misspelt, ClusterState(ledger=ledger_with_free(**FREE)), context=context(labelled("n1"))
    )
    assert "did you mean aliyun.com/gpu-core.percentage?\n" in text
    assert "; the lines above say what it waits for.\n" in text
    assert "did you mean aliyun.com/gpu-core.percentage?\n" in sentences.explain_pod(misspelt, None)


def test_a_scheduler_that_has_told_our_reasons_asks_us():
    text = heard({"schedulerName": "mine"}, refusal="0/2 nodes are available: 2 Insufficient GPU Memory in one device.")
    assert "Its scheduler" not in text


def test_nodes_that_the_pod_keeps_away_from_are_no_place_for_it():
    zones = context(labelled("n1", zone="a"), labelled("n2", zone="b"))
    some = heard({"nodeSelector": {"zone": "b"}}, zones)
    assert "It excludes n1 by its nodeSelector (zone=b)" in some
    assert "free on n2 (best first" in some
    none = heard({"nodeSelector": {"zone": "c"}}, zones)
    assert "It excludes every node with GPUs by its nodeSelector (zone=c)" in none
    assert "that fit are free" not in none
    tainted = labelled("n1") | {"spec": {"taints": [{"key": "mine", "effect": "NoSchedule"}]}}
    assert "taints that it does not tolerate (mine:NoSchedule)" in heard({}, context(tainted, labelled("n2")))
    assert "keeps away" not in heard({"nodeSelector": {"zone": "c"}}, PodContext()), "nodes may not be read"


NOT_READY = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
UNSCHEDULABLE = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}


def test_a_node_that_takes_no_pods_is_blamed_and_not_the_pod():
    dead = labelled("n1") | {"spec": {"taints": [NOT_READY, NOT_READY | {"effect": "NoExecute"}]}}
    cordoned = labelled("n2") | {"spec": {"taints": [UNSCHEDULABLE], "unschedulable": True}}
    text = heard({}, context(dead, cordoned))
    assert "Node n1 takes no new pods: it is NotReady.\n" in text
    assert "Node n2 takes no new pods: it is cordoned.\n" in text
    assert "  - node n1 were not NotReady (`kubectl describe node n1` says why): its request fits" in text
    assert "  - node n2 were not cordoned (`kubectl uncordon n2`): its request fits there\n" in text
    for blame in ("keeps away", "keep away", "tolerate"):
        assert blame not in text
    tainted = labelled("n1") | {"spec": {"taints": [NOT_READY, {"key": "mine", "effect": "NoSchedule"}]}}
    text = heard({}, context(tainted, labelled("n2")))
    assert "It excludes n1 by taints that it does not tolerate (mine:NoSchedule).\n" in text
    assert "Node n1 takes no new pods: it is NotReady.\n" in text


def test_a_placed_pod_hears_that_its_node_is_not_ready():
    annotations = assignment.encode(Assignment({"0": shares(4069, 0)}), assume_time_ns=1)
    there = pod("p", gpu_mem=4069, annotations=annotations, uid="u")
    there["spec"]["nodeName"] = "n1"
    there["status"] = {"phase": "Running"}
    seen = ClusterState(ledger=ledger_with_free(n1=[4069]))
    silent = labelled("n1") | {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
    text = sentences.explain_pod(there, seen, context=context(silent))
    assert "Node n1 is NotReady (its kubelet does not report): the pod's reported state may be outdated.\n" in text
    assert "Node n1 is" not in sentences.explain_pod(there, seen, context=context(labelled("n1")))


def test_a_name_of_nobody_is_told_with_what_was_meant():
    limits = {"amd.com/gpu": "1", "aliyun.com/gpu-memory": "8", "nvidia.com/mig-1g.5gb": "1", "nvidia.com/gpu": "0"}
    text = sentences.explain_pod(waiting("team-b", "p", limits), ClusterState(), context=context(labelled("n1")))
    assert "It requests aliyun.com/gpu-memory, which no node offers; did you mean aliyun.com/gpu-mem?\n" in text
    assert "It requests amd.com/gpu, which no node offers. Cardwise shares NVIDIA GPUs only.\n" in text
    assert "It requests nvidia.com/mig-1g.5gb, which belongs to another device plugin, not to Cardwise.\n" in text
    assert "nvidia.com/gpu," not in text
    blind = sentences.explain_pod(waiting("team-b", "p", limits), None)
    assert "aliyun.com/gpu-memory, which does not belong to Cardwise; did you mean aliyun.com/gpu-mem?" in blind


def test_the_former_replica_of_its_own_deployment_is_named_with_the_strategy():
    seen = ClusterState(ledger=ledger_with_free(n1=[100]))
    seen.ledger.release("n1-0")
    seen.ledger.set_holding(Holding("old", "team-b", "web-1-x", "n1", Assignment({"0": shares(16000, 0)})))
    text = sentences.explain_pod(waiting_for(4000), seen, context=context(former_replicas=frozenset({"web-1-x"})))
    assert "  - its own previous replica ended (web-1-x): write strategy.type: Recreate in the Deployment, or" in text
    assert "these ended" not in text, "no other pod has to"


def test_for_a_gang_all_that_must_end_are_named():
    seen = ClusterState(ledger=ledger_with_free(n1=[100], n2=[200], n3=[300]))
    partners = {name: pod_request for name in "ab" if (pod_request := request.parse(waiting_for(16000)))}
    nodes = [labelled(name) for name in ("n1", "n2", "n3")]
    text = sentences.explain_pod(waiting_for(16000), seen, context=PodContext(nodes, pending_members=partners))
    victims = "default/n1-0 (16176 MiB), default/n2-0 (16076 MiB), default/n3-0 (15976 MiB)"
    assert "  - these ended, for all 3 waiting pods of its gang: " in text
    assert all(victim in text.rpartition("gang: ")[2] for victim in victims.split(", "))
    assert len(seen.ledger) == 3, "as it was"


def of_gang(mem: int, partners: dict[str, int], *, seen: ClusterState | None = None, **fields: object) -> str:
    """What a pod of so many MiB hears whose gang has these waiting members besides, on n1 and n2 of one card each."""
    seen = seen or ClusterState(ledger=ledger_with_free(n1=[100], n2=[200]))
    asking = {
        name: pod_request for name, amount in partners.items() if (pod_request := request.parse(waiting_for(amount)))
    }
    held = seen.ledger.holdings()
    text = sentences.explain_pod(
        waiting_for(mem),
        seen,
        context=context(labelled("n1"), labelled("n2"), pending_members=asking, **fields),
    )
    assert seen.ledger.holdings() == held, "as it was"
    return text


def test_a_gang_that_could_never_start_hears_which_member_finds_no_place():
    never = "Its gang cannot start: member b would not fit even if every GPU were empty (n1, n2: "
    assert never in of_gang(4000, {"a": 16000, "b": 99999})
    crowded = (
        "Its gang would not fit as a whole even if every GPU were empty: placed one after another, 2 of its 3 waiting "
        "members fit, but 3 must; b does not fit (n1, n2: "
    )
    assert crowded in of_gang(16000, {"a": 16000, "b": 16000})
    assert "Its gang" not in of_gang(16000, {"a": 16000}), "what runs now may end"
    for fields in ({"is_planned": True}, {"missing_members": 2}):
        assert "Its gang" not in of_gang(16000, {"a": 16000, "b": 16000}, **fields)
    assert "Its gang" not in of_gang(4000, {"a": 99999, "b": 4000}, missing_members=2)
    narrow = of_gang(4000, {"a": 4000}, reachable_nodes={"a": frozenset()})
    assert "member a would not fit even if every GPU were empty (it may run on no node with GPUs)." in narrow


def test_what_bound_members_of_a_gang_hold_is_not_free_to_the_others():
    seen = ClusterState(ledger=ledger_with_free(n1=[16276], n2=[200]))
    seen.ledger.set_holding(Holding("first", "team-b", "first", "n1", Assignment({"0": shares(16000, 0)})))
    assert "Its gang" not in of_gang(16000, {"a": 16000}, seen=seen)
    assert "1 of its 2 waiting members fit, but 2 must; a does not fit" in of_gang(
        16000, {"a": 16000}, seen=seen, bound_members=frozenset({"first"})
    )


def test_a_gang_larger_than_its_quota_hears_of_it():
    seen = ClusterState(ledger=ledger_with_free(n1=[100], n2=[200]))
    seen.quotas = [quotas.parse(gpu_quota({"memoryMiB": 30000}, namespace="team-b"))]
    together = "Its gang cannot start: its 2 waiting members request 32000 MiB of all GPUs together, and GPUQuota team"
    assert f"{together} allows 30000.\n" in of_gang(16000, {"a": 16000}, seen=seen)
    assert "Its gang" not in of_gang(16000, {"a": 14000}, seen=seen)


def test_nobody_is_told_to_end_what_would_come_again_and_wait():
    """A running pod of the same gang or ReplicaSet."""
    seen = ClusterState(ledger=ledger_with_free(n1=[100], n2=[200]))
    seen.ledger.release("n2-0")
    seen.ledger.set_holding(Holding("own", "team-b", "serve-x", "n2", Assignment({"0": shares(16076, 0, node="n2")})))
    nodes = [labelled(name) for name in ("n1", "n2")]
    alone = sentences.explain_pod(
        waiting_for(4000), seen, context=PodContext(nodes, hopeless_pods=frozenset({"serve-x"}))
    )
    assert alone.endswith("  - these ended (GPU 0 of n1, 3900 MiB short): default/n1-0 (16176 MiB)\n")
    partners = {"serve-y": pod_request} if (pod_request := request.parse(waiting_for(4000))) else {}
    ganged = PodContext(nodes, hopeless_pods=frozenset({"serve-x"}), pending_members=partners)
    text = sentences.explain_pod(waiting_for(4000), seen, context=ganged)
    assert text.endswith("  - these ended, for all 2 waiting pods of its gang: default/n1-0 (16176 MiB)\n")
    assert "these ended" in sentences.explain_pod(waiting_for(4000), seen, context=PodContext(nodes[1:]))
    only = PodContext(nodes[1:], hopeless_pods=frozenset({"serve-x"}))
    assert "these ended" not in sentences.explain_pod(waiting_for(4000), seen, context=only)


def test_of_a_gangs_pod_without_cards_the_pods_with_some_say_more():
    partners = {"tf-worker-0": pod_request} if (pod_request := request.parse(waiting_for(4000))) else {}
    text = sentences.explain_pod(
        pod("tf-ps-0", containers=[{"name": "x"}]),
        ClusterState(),
        ["Its gang waits."],
        context=PodContext(None, pending_members=partners),
    )
    assert text.endswith("Its gang waits.\nTo explain members that request GPUs: cardwise explain pod tf-worker-0\n")


def test_who_keeps_away_from_the_only_cards_that_are_free_hears_what_does_it():
    zones = context(labelled("n1", zone="a"), labelled("n2", zone="b"))
    seen = ClusterState(ledger=ledger_with_free(n1=[100], n2=[16276]))
    picky = waiting_for(4000)
    picky["spec"] |= {"nodeSelector": {"zone": "a"}}
    text = sentences.explain_pod(picky, seen, context=zones)
    assert "It excludes n2 by its nodeSelector (zone=a).\n" in text
    assert "  - it did not exclude n2 by its nodeSelector (zone=a): its request fits there\n" in text
    tainted = labelled("n2") | {"spec": {"taints": [{"key": "mine", "value": "x", "effect": "NoSchedule"}]}}
    text = sentences.explain_pod(waiting_for(4000), seen, context=context(labelled("n1"), tainted))
    assert "It excludes n2 by taints that it does not tolerate (mine=x:NoSchedule).\n" in text
    picky["status"] = {"conditions": [{"type": "PodScheduled", "message": MISMATCH}]}
    blind = sentences.explain_pod(picky, None)
    assert (
        "It excludes nodes by its nodeSelector (zone=a), or its node affinity; ask an administrator which labels"
        in blind
    )


MISMATCH = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."


def test_who_requires_mps_where_there_is_none_hears_that_it_might_only_prefer_it():
    seen = ClusterState(ledger=ledger_with_free(n1=[16276]))
    text = sentences.explain_pod(waiting_for(4000, **{"cardwise.dev/isolation": "mps"}), seen)
    remedy = "  - it had cardwise.dev/isolation: advisory and so demanded less than mps: that fits now, on n1, if the"
    assert remedy + " minimum of its namespace and of the cluster allow it\n" in text
    full = ClusterState(ledger=ledger_with_free(n1=[100]))
    text = sentences.explain_pod(waiting_for(4000, **{"cardwise.dev/isolation": "mps"}), full)
    assert "cardwise.dev/isolation" not in text


def test_a_container_that_does_not_start_says_why():
    annotations = assignment.encode(Assignment({"0": shares(4069, 0)}), assume_time_ns=1) | {names.ASSIGNED: "true"}
    there = pod("p", gpu_mem=4069, annotations=annotations, uid="u")
    there["spec"]["nodeName"] = "n1"
    pulls = {"name": "main", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    crash = {
        "name": "side",
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"exitCode": 1, "reason": "Error"}},
    }
    holds_up = {"name": "agent", "started": False, "state": {"running": {"startedAt": "2026-11-26T05:00:00Z"}}}
    there["status"] = {"containerStatuses": [pulls, crash], "initContainerStatuses": [holds_up]}
    text = sentences.explain_pod(there, ClusterState(ledger=ledger_with_free(n1=[4069])))
    assert "The node has given it the share.\n  container agent is running but not ready; see" in text
    assert "  container main does not run: ImagePullBackOff: no such image\n" in text
    assert "  container side does not run: CrashLoopBackOff; it ended with exit code 1 (Error)\n" in text


def with_init(
    init: dict[str, object], phase: str = "Pending", main: dict[str, object] | None = None, *, policy: str = ""
) -> str:
    annotations = assignment.encode(Assignment({"0": shares(4069, 0)}), assume_time_ns=1)
    there = pod("p", gpu_mem=4069, init=[{"name": "fetch"}], annotations=annotations, uid="u")
    there["spec"] |= {"nodeName": "n1"} | ({"restartPolicy": policy} if policy else {})
    main = main or {"waiting": {"reason": "PodInitializing"}}
    there["status"] = {
        "phase": phase,
        "initContainerStatuses": [{"name": "fetch", "state": init}],
        "containerStatuses": [{"name": "main", "state": main}],
    }
    return sentences.explain_pod(there, ClusterState(ledger=ledger_with_free(n1=[4069])))


def test_an_init_container_is_what_the_pod_waits_for():
    not_yet = "The node has not given it the share yet: its init containers have not ended.\n"
    text = with_init({"running": {}})
    assert f"{not_yet}  init container fetch is running: the containers after it start once it has ended\n" in text
    text = with_init({"terminated": {"exitCode": 3, "reason": "Error"}})
    failed = (
        "  init container fetch ended with exit code 3 (Error): the kubelet restarts it, and the containers after it"
    )
    assert not_yet + failed in text
    text = with_init({"terminated": {"exitCode": 3, "reason": "Error"}}, policy="Never")
    failed = "  init container fetch failed with exit code 3 (Error): the containers after it do not start\n"
    assert not_yet + failed in text
    text = with_init({"waiting": {"reason": "CreateContainerConfigError", "message": 'configmap "c" not found'}})
    waits = '  init container fetch does not run: CreateContainerConfigError: configmap "c" not found\n'
    assert not_yet + waits in text
    text = with_init({"terminated": {"exitCode": 0, "reason": "Completed"}})
    assert "init container" not in text
    assert "its container is not running" in text
    ended = with_init({"terminated": {"exitCode": 3, "reason": "Error"}}, "Failed")
    assert "  init container fetch ended with exit code 3 (Error)\n" in ended


def test_a_container_that_has_ended_while_the_pod_goes_on_is_told():
    done = {"terminated": {"exitCode": 0, "reason": "Completed"}}
    restarted = with_init(done, "Running", done)
    assert "It runs.\n  container main ended with exit code 0 (Completed): the kubelet restarts it\n" in restarted
    text = with_init(done, "Running", done, policy="OnFailure")
    assert "It runs." not in text
    assert "  container main has ended with exit code 0 (Completed); the pod's share is free once all" in text


def test_what_runs_on_a_simulated_node_runs():
    annotations = assignment.encode(Assignment({"0": shares(4069, 0)}), assume_time_ns=1)
    there = pod("p", gpu_mem=4069, annotations=annotations, uid="u")
    there["spec"]["nodeName"] = "n1"
    there["status"] = {"phase": "Running"}
    assert "\nIt runs.\n" in sentences.explain_pod(there, ClusterState(ledger=ledger_with_free(n1=[4069])))


def test_a_sick_card_says_why():
    sick = card("n1", 0, health="Unhealthy")
    sick["status"]["reason"] = "Xid 79"
    seen = clusterstate.read_cluster_state(lists(extendedresources=[sick], pods=[], gpuquotas=[]).kube)
    assert "11441 of 11441 MiB free, unhealthy (Xid 79)" in sentences.explain_pod(waiting_for(4000), seen)

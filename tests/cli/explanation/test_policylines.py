"""What `cardwise explain` says about the placement policy that decides for a pod."""

import pytest

from cardwise.cli.cluster.published import PublishedPolicy
from cardwise.cli.explanation import policylines, sentences
from cardwise.cli.explanation.blockers import PodContext
from cardwise.core.api import names, request
from cardwise.kube.clusterstate import ClusterState
from tests.build import asking, container, ledger_with_free, node

ZONE = "topology.kubernetes.io/zone"
SPREAD_BY = f"spread-by={ZONE}"


def replica(name="p", *, policy=SPREAD_BY, node="", owner="rs", gang="", deleting=False, phase="Running"):
    pod = asking(name, gpu_mem=100, annotations={names.POLICY: policy} if policy else None)
    pod["metadata"]["ownerReferences"] = [{"uid": owner, "controller": True}]
    pod["metadata"]["labels"] = {names.GANG: gang} if gang else {}
    if deleting:
        pod["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:00Z"
    if node:
        pod["spec"]["nodeName"] = node
        pod["status"] = {"phase": phase}
    return pod


def node_in(name, zone):
    return node(name, labels={ZONE: zone} if zone else {})


def policy_line(pod, settings=PublishedPolicy("priced")):
    pod_request = request.parse(pod)
    assert pod_request is not None
    return policylines.explain_policy(pod, pod_request, settings)


OF_THE_POD = f"Its placement policy is {SPREAD_BY}, from its annotation or its namespace's"
OF_THE_EXTENDER = "Its placement policy is priced, from the extender's setting"
BINPACK = "binpack decides in place of priced, since"
SHARED_LINE = f"{OF_THE_POD}. Among equal nodes, and for the choice of GPUs, the extender's policy priced decides"
SEVERAL = asking("p") | {"spec": {"containers": [container("a", gpu_mem=1), container("b", whole_gpu=1)]}}


@pytest.mark.parametrize(
    ("pod", "line"),
    [
        (replica(policy=""), f"{OF_THE_EXTENDER}."),
        (replica(policy="spread"), "Its placement policy is spread, from its annotation or its namespace's."),
        (replica(), f"{SHARED_LINE}."),
        (replica(gang="g"), f"{SHARED_LINE}; {BINPACK} it is a member of a gang."),
        (
            SEVERAL,
            f"{OF_THE_EXTENDER}; {BINPACK} it has several separate GPU requests.",
        ),
    ],
)
def test_the_policy_that_decides_is_named_with_its_source_and_its_substitute(pod, line):
    assert policy_line(pod) == line


def test_a_policy_that_is_only_assumed_is_named_so():
    unread = PublishedPolicy(note="you may not read it")
    assert policy_line(replica(policy=""), unread) == (f"{OF_THE_EXTENDER} (assumed, since it is unknown here).")
    assert policy_line(replica(policy="binpack"), unread).startswith(
        "Its placement policy is binpack, from its annotation"
    )


def test_the_domains_with_the_fewest_pods_of_the_controller_come_first():
    cluster_state = ClusterState(ledger=ledger_with_free(n1=[5000], n2=[6000], n3=[7000], n4=[1000]))
    nodes = [node_in("n1", "a"), node_in("n2", "b"), node_in("n3", "b"), node_in("n4", "")]
    peers = [
        replica("q", node="n1"),
        replica("r", node="n1"),
        replica("s", node="n3"),
        replica("other", node="n3", owner="rs-2"),
        replica("plain", node="n3", policy=""),
        replica("going", node="n3", deleting=True),
        replica("ended", node="n3", phase="Succeeded"),
        replica("pending"),
    ]
    text = sentences.explain_pod(
        replica(),
        cluster_state,
        settings=PublishedPolicy("binpack"),
        context=PodContext(nodes, pods=[*peers, replica()]),
    )
    counts = f"Bound pods of its gang or controller by {ZONE}: 'b' 1, 'a' 2; 1 node without this label come last."
    assert counts in text
    assert f"free on n2, n3, n1, n4 (best first, {SPREAD_BY}, then binpack)" in text


def test_without_the_right_to_read_nodes_no_domain_is_named():
    cluster_state = ClusterState(ledger=ledger_with_free(n1=[5000]))
    text = sentences.explain_pod(replica(), cluster_state, settings=PublishedPolicy("binpack"))
    assert "Bound pods" not in text
    assert "free on n1 (best first, binpack)" in text

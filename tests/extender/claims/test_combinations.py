"""scheduler.mode=claims with all else that a pod may have, and which tests show it: also those of the page's table."""

import ast
import re
from functools import cache
from pathlib import Path

from cardwise.core.api import names
from cardwise.kube import paths
from tests.build import P100
from tests.extender.claims.test_claimscheduler import events_of, passes, pod_of, work, world_of
from tests.property.judge import node_of

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/reference/claims.md"
WEBHOOK, SCHEDULER = "tests/webhook/pods/test_claims.py", "tests/extender/claims/test_claimscheduler.py"
HERE, CLUSTER = "tests/extender/claims/test_combinations.py", "tests/integration/scheduler/test_claims.py"
CHART, NODE = "tests/integration/chart/test_claims_mode.py", "tests/deviceplugin/grants/test_claims.py"
SECURITY, FEATURES = "tests/integration/security/test_claims.py", "tests/integration/node/test_podfeatures.py"

# By what is combined (in the page, the first words of a row), the files and tests that show it.
TESTS = {
    "several containers": {
        WEBHOOK: ["test_each_container_has_a_request_of_its_own", "test_request_that_no_claim_can_hold_is_refused"],
        NODE: ["test_each_container_gets_its_own_cards_and_limits", "test_whole_cards_are_given_whole"],
        CLUSTER: ["test_several_containers_and_whole_gpus"],
        CHART: ["test_types_whole_gpus_and_several_containers"],
        HERE: ["test_a_split_share_is_one_request_for_two_gpus"],
    },
    "the share agent": {NODE: ["test_the_share_agent_has_a_request_without_a_share"]},
    "`share-with`": {
        HERE: [
            "test_a_pod_that_shares_within_its_namespace_keeps_others_from_its_gpu",
            "test_a_pod_that_demands_mps_waits_until_its_node_has_it",
        ]
    },
    "defaults of a namespace": {WEBHOOK: ["test_default_share_of_a_namespace"]},
    "gangs": {
        CLUSTER: ["test_a_gang_comes_as_a_whole_or_not_at_all"],
        SCHEDULER: ["test_a_member_without_a_gpu_gets_its_gate_opened_with_its_gang"],
        HERE: ["test_a_podgroup_of_kubernetes_waits_behind_the_same_gate"],
    },
    "DaemonSets": {
        WEBHOOK: ["test_pod_of_a_daemonset_is_planned_like_others"],
        HERE: ["test_a_pod_of_a_daemonset_waits_for_its_own_node"],
    },
    "Jobs": {SCHEDULER: ["test_a_pod_that_ends_gets_no_claim_again"]},
    "ephemeral containers": {FEATURES: ["test_a_container_for_debugging_sees_no_card"]},
    "resize in place": {HERE: ["test_a_pod_whose_cpu_is_resized_keeps_its_claim"]},
    "other claims": {WEBHOOK: ["test_claims_of_users_with_other_names_stay"]},
    "`spec.nodeName`": {WEBHOOK: ["test_pod_that_names_its_node_is_refused"]},
    "static pods": {WEBHOOK: ["test_mirror_of_a_static_pod_is_not_changed"]},
    "pods with a request in a namespace": {SECURITY: ["test_pod_in_a_namespace_that_is_exempt_from_the_webhook"]},
    "entry, claim or gate": {
        WEBHOOK: [
            "test_use_of_claims_and_gate_by_users_is_refused",
            "test_entry_of_a_container_without_a_share_is_removed",
        ],
        HERE: ["test_two_pods_that_name_one_claim_never_share_it"],
    },
    "Kueue": {HERE: ["test_a_pod_with_the_gate_of_another_project_waits_without_a_claim"]},
}


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_each_row_of_the_page_names_tests_that_exist():
    section = re.search(r"\n## What works with it\n.*?\n## ", PAGE.read_text(), re.DOTALL)
    assert section is not None
    rows = [row for row in re.findall(r"^\| ([^|]*)\|", section[0], re.MULTILINE) if row]
    assert rows
    assert [row for row in rows if not row.startswith(tuple(TESTS))] == []
    named = [(file, test) for files in TESTS.values() for file, tests in files.items() for test in tests]
    assert [(file, test) for file, test in named if test not in functions_of(file)] == []


def create(world, name="p1", *, change=lambda pod: None, **request):
    pod = world._asking(name, **request)
    change(pod)
    world.api.write_object(paths.pods(), pod)
    passes(world)
    return pod


def require_node(pod, node):
    """As the controller of a DaemonSet."""
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    terms = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    pod["spec"]["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def test_a_split_share_is_one_request_for_two_gpus():
    with world_of({"n1": [P100], "n2": [P100, P100]}) as world:
        create(world, gpu_mem=2000, split=2)
        allocation = world.allocation_of(pod_of(world))
        shares = allocation.assignment.shares()
        assert (allocation.node, [share.mem for share in shares]) == ("n2", [1000, 1000])
        assert len(world.claim_of(pod_of(world))["spec"]["devices"]["requests"]) == 1


def test_a_pod_that_shares_within_its_namespace_keeps_others_from_its_gpu():
    with world_of({"n1": [P100]}) as world:
        create(world, gpu_mem=1000, exclusive=True)
        create(world, "p2", gpu_mem=1000, exclusive=True)
        create(world, "p3", gpu_mem=1000, namespace="team")
        assert all(world.allocation_of(pod_of(world, name)) for name in ("p1", "p2"))
        (other,) = [pod for pod in world.pods() if pod["metadata"]["namespace"] == "team"]
        assert (world.claim_of(other), bool(other["spec"]["schedulingGates"])) == (None, True)


def test_a_pod_that_demands_mps_waits_until_its_node_has_it():
    with world_of({"n1": [P100], "n2": [{"mem": P100, "mps": "Ready"}]}) as world:
        create(world, gpu_mem=1000, mps="mps")
        assert world.allocation_of(pod_of(world)).node == "n2"
    with world_of({"n1": [P100]}) as world:
        create(world, gpu_mem=1000, mps="mps")
        assert world.claim_of(pod_of(world)) is None
        assert any("MPS" in text for text in events_of(world)), events_of(world)


def test_a_podgroup_of_kubernetes_waits_behind_the_same_gate():
    def join(pod):
        pod["spec"]["schedulingGroup"] = {"podGroupName": "g"}
        pod["metadata"]["labels"] = {names.GANG: "g"}

    with world_of() as world:
        policy = {"gang": {"minCount": 2}}
        world.api.answers["/apis/scheduling.k8s.io/v1beta1/namespaces/default/podgroups/g"] = {
            "spec": {"schedulingPolicy": policy}
        }
        create(world, gpu_mem=1000, change=join)
        passes(world, 5.0)
        assert world.claim_of(pod_of(world)) is None
        create(world, "p2", gpu_mem=1000, change=join)
        passes(world, 5.0)
        assert all(world.allocation_of(pod_of(world, name)) for name in ("p1", "p2"))


def test_a_pod_of_a_daemonset_waits_for_its_own_node():
    with world_of() as world:
        create(world, gpu_mem=P100, change=lambda pod: require_node(pod, "n2"))
        create(world, "p2", gpu_mem=1000, change=lambda pod: require_node(pod, "n2"))
        assert world.allocation_of(pod_of(world)).node == "n2"
        assert world.claim_of(pod_of(world, "p2")) is None
        create(world, "p3", gpu_mem=1000, change=lambda pod: require_node(pod, "n1"))
        assert world.allocation_of(pod_of(world, "p3")).node == "n1"


def test_a_pod_whose_cpu_is_resized_keeps_its_claim():
    with world_of() as world:
        create(world, gpu_mem=1000)
        work(world, 1)
        before = world.claim_of(pod_of(world))
        resized = pod_of(world)
        resized["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "2"
        world.api.write_object(paths.pods(), resized)
        passes(world, 8.0)
        pod = pod_of(world)
        assert (bool(node_of(pod)), pod["spec"]["containers"][0]["resources"]["requests"]["cpu"]) == (True, "2")
        assert world.claim_of(pod)["metadata"]["uid"] == before["metadata"]["uid"]


def test_a_pod_with_the_gate_of_another_project_waits_without_a_claim():
    def gate(pod):
        pod["spec"]["schedulingGates"].append({"name": "kueue.x-k8s.io/admission"})

    with world_of() as world:
        pod = create(world, gpu_mem=1000, change=gate)
        assert world.claim_of(pod) is None
        change = {"metadata": {}, "spec": {"schedulingGates": [{"name": names.ALLOCATION_GATE}]}}
        world.api.client().patch(paths.pods("default", "p1"), change, "merge")
        passes(world)
        assert world.allocation_of(pod_of(world)) is not None


def test_two_pods_that_name_one_claim_never_share_it():
    """A user writes gate and claim as the webhook does. The second pod gets the claim when the first is gone."""
    with world_of() as world:
        first = create(world, gpu_mem=1000)
        entries = first["spec"]["resourceClaims"]
        create(world, "p2", gpu_mem=1000, change=lambda pod: pod["spec"].update(resourceClaims=entries))
        passes(world, 20.0)
        assert world.allocation_of(pod_of(world)).pod_uid == "uid-p1"
        assert pod_of(world, "p2")["spec"]["schedulingGates"]
        assert any("another ResourceClaim has the name" in text for text in events_of(world)), events_of(world)

"""scheduler.mode=claims: what the cluster lacks, components in another mode, and pods that were created there."""

from typing import Any

import pytest

from cardwise.cli.doctor import checks
from cardwise.cli.doctor.facts import Facts
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from tests import build
from tests.cli.doctor import planted
from tests.cli.doctor.planted import Faults, controlled, troubles
from tests.cli.doctor.test_doctor import ASSIGNED, Probed
from tests.fakes.apiserver import Request

FAULTS = Faults()
CLASS = {"metadata": {"name": names.DRIVER}}
PROTECTION = ("allocation.cardwise.dev",)


def give_option(workload: Json, *words: str) -> None:
    workload["spec"]["template"]["spec"]["containers"] = [{"name": "main", "args": list(words)}]


@pytest.fixture
def with_claims(sound: Facts) -> Facts:
    """A sound installation in this mode."""
    sound.device_classes = [CLASS]
    sound.policies = [*sound.policies, *map(planted.policy, PROTECTION)]
    sound.policy_bindings = [*sound.policy_bindings, *map(planted.policy_binding, PROTECTION)]
    sound.deployments = [planted.part(name, readyReplicas=2, replicas=2) for name in ("webhook", "extender")]
    numbers = {"desiredNumberScheduled": 1, "numberReady": 1, "numberAvailable": 1}
    sound.daemonsets = [planted.part("deviceplugin", "DaemonSet", **numbers)]
    for workload in (*sound.deployments, *sound.daemonsets):
        give_option(workload, "--claims", "--client-ca=/ca.crt")
    return sound


def claiming(name: str = "p") -> Json:
    """A pending pod as the webhook leaves it in this mode."""
    pod = build.pod(name, gpu_mem=900)
    pod["spec"] |= {
        "resourceClaims": [{"name": names.POD_CLAIM, "resourceClaimName": "cardwise-0123456789abcdef"}],
        "schedulingGates": [{"name": names.ALLOCATION_GATE}],
    }
    pod["spec"]["containers"][0]["resources"]["claims"] = [{"name": names.POD_CLAIM, "request": "main"}]
    return controlled(pod)


def slotted(name: str = "p") -> Json:
    """A pending pod as the webhook leaves it in the other modes."""
    return controlled(build.pod(name, gpu_mem=900, share=1))


def findings_of(facts: Facts) -> dict[str, Finding]:
    return {finding.check: finding for finding in checks.check_facts(facts)}


def test_sound_installation(with_claims: Facts) -> None:
    with_claims.pending_pods = [claiming()]
    assert troubles(with_claims) == []
    assert findings_of(with_claims)["claims"].level is Severity.OK


def test_other_modes_need_nothing_of_claims(sound: Facts) -> None:
    """Also where the API server does not know them."""
    sound.unknown_kinds.add("device_classes")
    assert troubles(sound) == []
    assert "claims" not in findings_of(sound)


@FAULTS.says(Severity.PROBLEM, "does not serve resource.k8s.io/v1", "upgrade to Kubernetes 1.34, or turn it on")
def plant_no_api(facts: Facts) -> None:
    facts.device_classes = []
    facts.unknown_kinds.add("device_classes")


@FAULTS.says(Severity.PROBLEM, "DeviceClass cardwise.dev is missing", "let the chart recreate it: helm upgrade")
def plant_no_class(facts: Facts) -> None:
    facts.device_classes = [{"metadata": {"name": "gpu.nvidia.com"}}]


@FAULTS.says(Severity.PROBLEM, "extender: runs without --claims although the others have it", "scheduler.mode=claims")
def plant_other_extender(facts: Facts) -> None:
    for workload in facts.deployments:
        if workload["metadata"]["name"] == "cardwise-extender":
            give_option(workload, "--lease-duration=5")


@FAULTS.says(Severity.PROBLEM, "allocation.cardwise.dev missing or not enforced: a user could name", "kubectl delete")
def plant_no_policy(facts: Facts) -> None:
    facts.policies = [policy for policy in facts.policies if policy["metadata"]["name"] not in PROTECTION]


def test_a_policy_that_only_warns_is_a_problem(with_claims: Facts) -> None:
    others = [binding for binding in with_claims.policy_bindings if binding["metadata"]["name"] not in PROTECTION]
    lenient = [planted.policy_binding(name, validationActions=["Warn"]) for name in PROTECTION]
    with_claims.policy_bindings = [*others, *lenient]
    finding = findings_of(with_claims)["claims"]
    assert (finding.level, "so the extender does not lead" in finding.text) == (Severity.PROBLEM, True)


def manager(*words: str) -> Json:
    return {"metadata": {"name": "kube-controller-manager-n1"}, "spec": {"containers": [{"command": list(words)}]}}


@FAULTS.says(
    Severity.WARNING, "kube-controller-manager-n1 does not run resourceclaim-controller", "remove -resourceclaim"
)
def plant_no_controller(facts: Facts) -> None:
    facts.controller_managers = [manager("kube-controller-manager", "--controllers=*,-resourceclaim-controller")]


@FAULTS.says(
    Severity.WARNING, "1 pod (default/old) was created in another scheduler.mode: it gets no GPU", "kubectl delete pods"
)
def plant_former_pod(facts: Facts) -> None:
    facts.pending_pods = [slotted("old"), claiming("new")]


@pytest.mark.parametrize(("plant", "level", "text", "remedy"), FAULTS)
def test_planted_fault_is_found_alone_with_a_remedy(
    with_claims: Facts, plant: Any, level: Severity, text: str, remedy: str
) -> None:
    plant(with_claims)
    (finding,) = troubles(with_claims)
    assert finding.check == "claims"
    assert (finding.level, text in finding.text, remedy in finding.remedy) == (level, True, True), finding


@pytest.mark.parametrize(
    "words", [("--controllers=*",), ("--controllers=*,tokencleaner",), ("kube-controller-manager",)]
)
def test_manager_that_runs_the_controller(with_claims: Facts, words: tuple[str, ...]) -> None:
    with_claims.controller_managers = [manager(*words)]
    assert troubles(with_claims) == []


def test_pods_with_claims_wait_in_the_other_modes(sound: Facts) -> None:
    sound.pending_pods = [claiming("left")]
    (finding,) = troubles(sound)
    assert "1 pod (default/left) was created in another scheduler.mode" in finding.text


def test_pods_that_an_uninstallation_has_left_behind_their_gate() -> None:
    facts = Facts(version={"gitVersion": "v1.37.2"}, pending_pods=[claiming("left")])
    facts.unknown_kinds = {"cards", "classes", "gpuquotas"}
    (finding,) = [finding for finding in checks.check_facts(facts) if finding.check == "claims"]
    assert "1 pod (default/left) was created in another scheduler.mode: it gets no GPU" in finding.text
    assert "kubectl delete pods" in finding.remedy


def test_control_planes_need_no_configuration(with_claims: Facts) -> None:
    """Nobody calls the extender, so a kube-scheduler that does not is no fault, nor one that still does."""

    def mirror(node: str, **annotations: str) -> Json:
        metadata = {"name": f"kube-scheduler-{node}", "annotations": {names.MIRROR: "x", **annotations}}
        return {"metadata": metadata, "spec": {"nodeName": node, "containers": []}}

    with_claims.schedulers = [mirror("n1"), mirror("n2", **{names.FORMER_CONFIG: "x"})]
    assert troubles(with_claims) == []


class ClaimProbe(Probed):
    """A cluster of this mode; `opens`: whether the extender opens the probe's gate."""

    def __init__(self, *, opens: bool) -> None:
        super().__init__({"spec": {"nodeName": "n1"}, "metadata": {"annotations": ASSIGNED}} if opens else {})

    def _rewrite(self, request: Request) -> None:
        written = claiming()["spec"]
        request.body["spec"] |= {field: written[field] for field in ("resourceClaims", "schedulingGates")}
        resources = request.body["spec"]["containers"][0]["resources"]
        resources["claims"] = [{"name": names.POD_CLAIM, "request": "probe"}, {"name": "other"}]
        request.body["spec"]["resourceClaims"].append({"name": "other", "resourceClaimName": "mine"})


def test_probe_carries_claim_and_gate_into_our_namespace() -> None:
    """And nothing of another webhook."""
    probed = ClaimProbe(opens=True)
    webhook, placed = probed.probe()
    assert (webhook.level, placed.level) == (Severity.OK, Severity.OK)
    assert placed.text == "the probe pod was placed on a GPU of n1 by the extender"
    spec = probed.created[-1].body["spec"]
    assert spec["resourceClaims"] == claiming()["spec"]["resourceClaims"]
    assert spec["schedulingGates"] == [{"name": names.ALLOCATION_GATE}]
    assert spec["containers"][0]["resources"]["claims"] == [{"name": names.POD_CLAIM, "request": "probe"}]


def test_probe_whose_gate_stays_closed() -> None:
    """The API server's word about gates is not taken for a refusal of kube-scheduler."""
    _, finding = ClaimProbe(opens=False).probe()
    assert (
        finding.text
        == "the extender has not allocated a claim for the probe pod for 15 s: no node offers " + names.GPU_MEM
    )
    assert finding.level is Severity.NOTE

"""scheduler.mode=claims: what the chart installs for it, and where it refuses."""

import pytest

from cardwise.core.api import names
from cardwise.core.api.claims import POLICIES
from cardwise.core.values.decoded import Json
from tests.helm.rendering import CLAIMS, Objects, Render, get_object, template


def arguments(objects: Objects, kind: str, part: str) -> list[str]:
    pod = get_object(objects, kind, f"cardwise-{part}")["spec"]["template"]["spec"]
    return list(pod["containers"][0]["args"])


def rights(objects: Objects, part: str = "extender") -> set[tuple[str, str]]:
    """Resource and verb of the part's role, of the group of claims."""
    rules = get_object(objects, "ClusterRole", f"cardwise-{part}")["rules"]
    return {
        (resource, verb)
        for rule in rules
        if "resource.k8s.io" in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_class_selects_no_device(render: Render) -> None:
    """So no scheduler allocates of it, and only what the extender has allocated counts."""
    spec = get_object(render(*CLAIMS), "DeviceClass", names.DRIVER)["spec"]
    assert spec == {"selectors": [{"cel": {"expression": "false"}}]}


@pytest.mark.parametrize(
    ("kind", "part"), [("Deployment", "webhook"), ("Deployment", "extender"), ("DaemonSet", "deviceplugin")]
)
def test_parts_are_told(render: Render, kind: str, part: str) -> None:
    assert "--claims" in arguments(render(*CLAIMS), kind, part)
    assert "--claims" not in arguments(render(), kind, part)


def test_scheduler_is_left_alone(render: Render) -> None:
    """No job on the control plane, no second scheduler, no scheduler's name in pods."""
    kinds_and_names = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in render(*CLAIMS)}
    assert not [name for _, name in kinds_and_names if "kubeadm" in name or name == names.SCHEDULER]
    assert not [entry for entry in arguments(render(*CLAIMS), "Deployment", "webhook") if "--scheduler=" in entry]


def test_extender_has_the_rights_to_claims(render: Render) -> None:
    """Kubernetes 1.36 and later ask for the right to `resourceclaims/binding` where an allocation changes."""
    claims = ("get", "list", "watch", "create", "delete")
    allocation = {("resourceclaims/status", "patch"), ("resourceclaims/binding", "patch")}
    assert rights(render(*CLAIMS)) == {("resourceclaims", verb) for verb in claims} | allocation
    assert rights(render()) == set()
    rules = get_object(render(*CLAIMS), "ClusterRole", "cardwise-extender")["rules"]
    (named,) = [rule["resourceNames"] for rule in rules if "resourceNames" in rule]
    assert named == list(POLICIES), "those without which the extender does not start"


def test_device_plugin_reads_claims_and_reaches_the_kubelet(render: Render) -> None:
    """Only in this mode: the kubelet finds DRA plugins in plugins_registry."""
    assert rights(render(*CLAIMS), "deviceplugin") == {("resourceclaims", "get")}
    assert rights(render(), "deviceplugin") == set()
    folders = {"/var/lib/kubelet/plugins_registry", "/var/lib/kubelet/plugins/cardwise.dev"}
    for sets, mounted in ((CLAIMS, folders), ((), set())):
        pod = get_object(render(*sets), "DaemonSet", "cardwise-deviceplugin")["spec"]["template"]["spec"]
        assert {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]} & folders == mounted
        assert {volume.get("hostPath", {}).get("path") for volume in pod["volumes"]} & folders == mounted


TOO_OLD = "scheduler.mode: claims needs Kubernetes 1.34, and this is v1.33.9; upgrade, or write another mode"


@pytest.mark.parametrize(
    ("sets", "flags", "message"),
    [
        ((), ("--kube-version", "1.33.9"), TOO_OLD),
        (("policies.enabled=false",), (), "policies.enabled: scheduler.mode=claims needs the policies"),
    ],
)  # fmt: skip
def test_refused_with_the_remedy(helm: str, sets: tuple[str, ...], flags: tuple[str, ...], message: str) -> None:
    done = template(helm, *CLAIMS, *sets, flags=flags)
    assert done.returncode
    assert message in done.stderr


def test_pre_releases_of_the_first_version_are_accepted(helm: str) -> None:
    """As managed control planes number theirs."""
    for version in ("1.34.0", "v1.34.2-gke.100", "v1.34.1-eks-1a2b3c", "1.37.2+k3s1"):
        done = template(helm, *CLAIMS, flags=("--kube-version", version))
        assert done.returncode == 0, done.stderr


def test_pods_are_sent_to_the_webhook_by_their_claims_too(render: Render) -> None:
    """A user's own use of the gate or of a claim of Cardwise is refused with a text, in pods without a request."""

    def condition(objects: Objects) -> str:
        hooks: list[Json] = get_object(objects, "MutatingWebhookConfiguration", "cardwise")["webhooks"]
        pods = next(hook for hook in hooks if hook["name"] == "pods.cardwise.dev")
        return str(pods["matchConditions"][-1]["expression"])

    assert names.ALLOCATION_GATE in condition(render(*CLAIMS))
    assert names.ALLOCATION_GATE not in condition(render())

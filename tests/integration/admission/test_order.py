"""Other projects' mutating webhooks that run before and after ours, on the real API server: what they add is rewritten,
whatever their names, or refused with what happened. docs/design/0030-order-of-webhooks.md.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from tests.build import container
from tests.cluster import Cluster
from tests.integration.admission.injector import LABELS, Change, Injector
from tests.integration.conftest import spaces
from tests.integration.sharing import Space, deployment, wait_for_classes, workload

pytestmark = [pytest.mark.cluster("sim")]

P100 = "nvidia.tesla-p100"  # what simulated cards are
DEPLOYMENTS = "/apis/apps/v1/namespaces/{}/deployments"
# Names of configurations, which the API server sorts: cardwise, zz-cardwise.
BEFORE, BETWEEN, AFTER = "aaa-injector", "mesh-injector", "zzz-injector"
REFUSED = (
    "was not rewritten by the Cardwise webhook: a mutating webhook that runs after Cardwise's has added it",
    "give its MutatingWebhookConfiguration a name that sorts before cardwise",
)


@pytest.fixture(scope="module")
def injector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Injector]:
    injector = Injector(tmp_path_factory.mktemp("injector"))
    yield injector
    injector.close()


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    for space in spaces(cluster, request):
        space.nodes()
        wait_for_classes(space, P100)
        yield space


def dry(space: Space, manifest: Json, path: str = "") -> Json:
    """The object as it would be stored."""
    manifest["metadata"]["labels"] = LABELS
    pods: Json = space.cluster.api.create(path or paths.pods(space.name), manifest, query={"dryRun": "All"})
    return pods


def injecting(
    space: Space, injector: Injector, name: str, change: Change, policy: str = "Never"
) -> AbstractContextManager[None]:
    return injector.registered(space.cluster, name, change, lambda: dry(space, workload("probe")), policy=policy)


def once(change: Callable[[Json], list[Json]]) -> Change:
    """The change of objects that do not have it yet: a webhook must take its own work for done."""

    def changed(manifest: Json) -> list[Json]:
        if "injected" in (manifest["metadata"].get("annotations") or {}):
            return []
        annotations = {**(manifest["metadata"].get("annotations") or {}), "injected": "yes"}
        return [{"op": "add", "path": "/metadata/annotations", "value": annotations}, *change(manifest)]

    return changed


def adds_container(**amounts: object) -> Change:
    return once(lambda _: [{"op": "add", "path": "/spec/containers/0", "value": container("mesh", **amounts)}])


def adds_limits(**limits: str) -> Change:
    requirements = {"limits": limits}
    return once(lambda _: [{"op": "add", "path": "/spec/containers/0/resources", "value": requirements}])


def adds_annotations(**annotations: str) -> Change:
    return lambda manifest: [
        {
            "op": "add",
            "path": "/metadata/annotations",
            "value": (manifest["metadata"].get("annotations") or {}) | annotations,
        }
    ]


def limits_of(pod: Json) -> dict[str, Json]:
    return {
        container["name"]: container.get("resources", {}).get("limits", {}) for container in pod["spec"]["containers"]
    }


def visible(pod: Json) -> dict[str, Json]:
    """What each container says of NVIDIA_VISIBLE_DEVICES."""
    return {
        container["name"]: entry.get("value") or entry["valueFrom"]["fieldRef"]["fieldPath"]
        for container in pod["spec"]["containers"]
        for entry in container.get("env") or ()
        if entry["name"] == names.ENV_VISIBLE_DEVICES
    }


GANG = {names.GROUP_NAME: "g", names.GROUP_NUM: "2"}
ADDED = {
    "a container with a share": (
        adds_container(gpu_mem="512Mi"),
        lambda pod: (
            limits_of(pod)["mesh"] == {names.GPU_MEM: "512", names.SHARE: "1"}
            and visible(pod) == {"mesh": f"metadata.annotations['{names.DEVICES_OF}0']", "main": "void"}
        ),
    ),
    "a share": (
        adds_limits(**{names.GPU_MEM: "1Gi"}),
        lambda pod: limits_of(pod)["main"] == {names.GPU_MEM: "1024", names.SHARE: "1"},
    ),
    "a class by its bare name": (
        adds_limits(**{P100: "1"}),
        lambda pod: limits_of(pod)["main"] == {names.WHOLE_GPU: "1", names.CLASS_PREFIX + P100: "1", names.SHARE: "1"},
    ),
    "a class by annotation": (
        adds_annotations(**{names.CLASS: P100}),
        lambda pod: limits_of(pod)["main"] == {names.WHOLE_GPU: "1", names.CLASS_PREFIX + P100: "1", names.SHARE: "1"},
    ),
    "a gang": (
        adds_annotations(**GANG),
        lambda pod: (
            pod["metadata"]["labels"][names.GANG] == "g"
            and pod["spec"]["schedulingGates"] == [{"name": names.GANG}]
            and limits_of(pod)["main"] == {names.FILTER_CALL_RESOURCE: "0", names.BIND_CALL_RESOURCE: "0"}
        ),
    ),
}


@pytest.mark.parametrize("name", [BEFORE, BETWEEN])
@pytest.mark.parametrize("policy", ["Never", "IfNeeded"])
def test_what_is_added_to_a_plain_pod_is_rewritten(space: Space, injector: Injector, name: str, policy: str) -> None:
    for addition, (change, rewritten) in ADDED.items():
        with injecting(space, injector, name, change, policy):
            pod = dry(space, workload("plain"))
            assert rewritten(pod), f"{addition}: {pod}"


def test_what_is_added_behind_all_of_ours_is_refused_with_what_happened(space: Space, injector: Injector) -> None:
    bent = "a mutating webhook that runs after Cardwise's has changed it"
    slot = adds_limits(**{names.SHARE: "1"})
    for change, says in (
        (ADDED["a container with a share"][0], ("spec.containers[0].resources.limits: ", *REFUSED)),
        (ADDED["a share"][0], ("spec.containers[0].resources.limits: ", *REFUSED)),
        (ADDED["a class by annotation"][0], (f"metadata.annotations[{names.CLASS}]: ", *REFUSED)),
        (ADDED["a gang"][0], (f"metadata.labels[{names.GANG}]: ", bent)),
        (slot, (f"spec.containers[0].resources.limits[{names.SHARE}]: ", *REFUSED)),
    ):
        with injecting(space, injector, AFTER, change):
            with pytest.raises(errors.Invalid) as refused:
                dry(space, workload("plain"))
            for text in says:
                assert text in str(refused.value)


@pytest.mark.parametrize("name", [BEFORE, BETWEEN, AFTER])
def test_a_container_that_is_put_in_front_moves_the_share_with_its_own(
    space: Space, injector: Injector, name: str
) -> None:
    with injecting(space, injector, name, adds_container()):
        pod = dry(space, workload("share", gpu_mem=64))
        assert visible(pod) == {"mesh": "void", "main": f"metadata.annotations['{names.DEVICES_OF}1']"}


@pytest.mark.parametrize(("name", "shares"), [(BEFORE, "mesh"), (BETWEEN, "main")])
def test_a_container_that_is_put_in_front_of_a_default_share(
    space: Space, injector: Injector, name: str, shares: str
) -> None:
    """The entry for defaults is for pods that ask for nothing, so it is not called again once it has given a share to
    the first container.
    """
    api, namespace = space.cluster.api, paths.namespaces(space.name)
    metadata = {"labels": {names.DEFAULTS_LABEL: "enabled"}, "annotations": {names.DEFAULT_GPU_MEM: "64"}}
    api.patch(namespace, {"metadata": metadata}, "merge")
    space.wait(lambda: visible(dry(space, workload("plain"))), "the API server knows the label")
    with injecting(space, injector, name, adds_container()):
        pod = dry(space, workload("plain"))
        key = [container["name"] for container in pod["spec"]["containers"]].index(shares)
        other = {"mesh": "main", "main": "mesh"}[shares]
        assert visible(pod) == {shares: f"metadata.annotations['{names.DEVICES_OF}{key}']", other: "void"}


def test_quotas_and_templates_are_rewritten_too(space: Space, injector: Injector) -> None:
    """A quota would count bytes, in silence; a template with a bare name is refused by Kubernetes."""
    key = f"requests.{names.GPU_MEM}"
    quotas = f"{paths.namespaces(space.name)}/resourcequotas"
    hard = once(lambda _: [{"op": "add", "path": "/spec/hard", "value": {"pods": "9", key: "8Gi"}}])
    with injecting(space, injector, BETWEEN, hard):
        stored = dry(space, {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "9"}}}, quotas)
        assert stored["spec"]["hard"][key] == "8192"
    at = "/spec/template/spec/containers/0/resources"
    bare = once(lambda _: [{"op": "add", "path": at, "value": {"limits": {P100: "1"}}}])
    with injecting(space, injector, BETWEEN, bare):
        stored = dry(space, deployment("d", 0), DEPLOYMENTS.format(space.name))
        (template_container,) = stored["spec"]["template"]["spec"]["containers"]
        assert template_container["resources"]["limits"] == {names.CLASS_PREFIX + P100: "1"}


def test_a_pod_that_nobody_changes_comes_once(space: Space) -> None:
    """Beside what is validated: a second review of each would cost every pod with cards."""

    pods: list[Json] = [
        workload("share", gpu_mem="1Gi"),
        workload("whole", gpu_count=1),
        workload("split", gpu_mem="2Gi", gpu_count=2),
        workload("typed", annotations={names.CLASS: P100}),
        workload("member", annotations=GANG),
        workload("sharing", gpu_mem=64, annotations=GANG | {names.SHARE_AGENT: "always"}),
        workload("beside", [container("other"), container("main", gpu_mem=64)]),
    ]
    for pod in pods:
        assert calls_of_entries(space, pod) == {"pods.cardwise.dev": 1}, pod["metadata"]["name"]
    assert calls_of_entries(space, workload("plain")) == {}, "a pod that asks for nothing comes never"


def calls_of_entries(space: Space, pod: Json) -> dict[str, int]:
    """How often the API server asks each of our mutating entries about the pod."""
    before = reviews(space.cluster)
    dry(space, pod)
    return dict(reviews(space.cluster) - before)


def reviews(cluster: Cluster) -> Counter[str]:
    """How often the API server has asked each of our mutating entries for pods."""
    families = text_string_to_metric_families(cluster.api.request("GET", "/metrics").decode())
    counts = Counter[str]()
    for sample in (sample for family in families for sample in family.samples):
        name = sample.labels.get("name", "")
        if sample.name == "apiserver_admission_webhook_request_total" and sample.labels["type"] == "admit":
            counts[name] += int(sample.value) if name.startswith("pods") else 0
    return counts


def test_what_others_add_costs_two_reviews_more_at_most(space: Space, injector: Injector) -> None:
    """0030 says so."""
    with injecting(space, injector, BETWEEN, adds_container(gpu_mem="512Mi")):
        assert calls_of_entries(space, workload("plain")) == {"pods-late.cardwise.dev": 1}
        assert calls_of_entries(space, workload("share", gpu_mem=64)) == {
            "pods.cardwise.dev": 2,
            "pods-late.cardwise.dev": 1,
        }


def test_pods_without_gpu_go_on_while_the_webhook_hangs_whoever_else_changes_them(
    space: Space, injector: Injector
) -> None:
    webhook = space.cluster.process("webhook")
    with injecting(space, injector, BETWEEN, adds_container()):
        webhook.pause()
        try:
            assert limits_of(dry(space, workload("plain"))) == {"mesh": {}, "main": {}}
        finally:
            webhook.resume()

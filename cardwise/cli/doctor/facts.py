"""The facts of a cluster that the checks need: each list is read once, and lists that cannot be read are recorded."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Final

from cardwise.cli.cluster import podevents
from cardwise.cli.cluster.podevents import Event
from cardwise.cli.doctor import bypasses
from cardwise.core.api import names
from cardwise.core.values.decoded import Json, labels_of
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

_APPS = "/apis/apps/v1"
_NETWORKING = "/apis/networking.k8s.io/v1"
RUNTIME_CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
NODE_LEASES = "kube-node-lease"
SYSTEM_NAMESPACE = "kube-system"
_SCHEDULER_LABEL = "component=kube-scheduler"
_CONTROLLER_MANAGER_LABEL = "component=kube-controller-manager"
_DEVICE_CLASSES_PATH = "/apis/resource.k8s.io/v1/deviceclasses"
PENDING_SELECTOR = "spec.nodeName=,status.phase=Pending"  # a field selector of pods
_NAME_LABEL: Final = "app.kubernetes.io/name"
_PARTS_SELECTOR = f"{_NAME_LABEL}=cardwise"  # the label of every object of the chart


@dataclass(slots=True)
class Facts:
    """Decoded objects by kind.

    A kind that the API server does not know is in `unknown_kinds`. A kind that could not be read is in `unread_kinds`,
    with the API server's message, which is "" for a missing right. In both cases the field of the kind is empty.

    Tenants create workloads with any name and label in their namespaces. So `collect_lists` separates the workloads of
    Cardwise's namespace from all others: the checks of Cardwise's components see only the former.
    """

    cardwise_namespace: str = names.NAMESPACE  # the namespace of Cardwise
    version: Json = field(default_factory=dict)
    now: datetime | None = None  # the time by the API server's clock, since the user's clock may differ
    nodes: Sequence[Json] = ()
    cards: Sequence[Json] = ()  # ExtendedResources
    classes: Sequence[Json] = ()
    daemonsets: Sequence[Json] = ()  # DaemonSets of Cardwise's namespace; `deployments` are of this namespace too
    deployments: Sequence[Json] = ()
    other_daemonsets: Sequence[Json] = ()  # DaemonSets of all other namespaces: tenants may have written their texts
    other_deployments: Sequence[Json] = ()
    mutating_webhooks: Sequence[Json] = ()
    validating_webhooks: Sequence[Json] = ()
    policies: Sequence[Json] = ()  # ValidatingAdmissionPolicies
    policy_bindings: Sequence[Json] = ()
    node_leases: Sequence[Json] = ()
    leases: Sequence[Json] = ()
    schedulers: Sequence[Json] = ()  # pods of kube-scheduler
    controller_managers: Sequence[Json] = ()  # pods of kube-controller-manager
    device_classes: Sequence[Json] = ()  # unknown where the API server does not serve resource.k8s.io/v1
    pending_pods: Sequence[Json] = ()  # pods without a node, of all namespaces
    own_pods: Sequence[Json] = ()  # pods of Cardwise's components
    own_events: Sequence[Event] = ()  # warnings in Cardwise's namespace
    pod_events: Sequence[
        Event
    ] = ()  # Events about pods that the extender deleted because another scheduler had bound them; some may be forged
    runtimeclasses: Sequence[Json] = ()
    resourcequotas: Sequence[Json] = ()
    gpuquotas: Sequence[Json] = ()
    networkpolicies: Sequence[Json] = ()  # NetworkPolicies of Cardwise's namespace
    node_events: Sequence[Event] = ()  # Events about nodes with a card whose ExtendedResource names another node
    namespaces: Sequence[Json] = ()  # namespaces with an annotation for the unit of gpu-mem numbers
    namespace: Json | None = None  # the namespace of Cardwise; None if it does not exist or may not be read
    unknown_kinds: set[str] = field(default_factory=set)
    unread_kinds: dict[str, str] = field(default_factory=dict)

    def card_nodes(self) -> set[str]:
        """The nodes that have an ExtendedResource: a card or another device."""
        return {card["spec"]["node"] for card in self.cards}


PROBE_POD_PREFIX: Final = "cardwise-doctor-"  # the prefix of the names of doctor's own pods

_EVENT_FIELDS: Final = ("own_events", "pod_events", "node_events")
_OTHER_NAMESPACES_FIELD: Final = {"daemonsets": "other_daemonsets", "deployments": "other_deployments"}
_FIELDS_WITHOUT_LIST: Final = (
    "cardwise_namespace",
    "version",
    "now",
    "unknown_kinds",
    "unread_kinds",
    *_OTHER_NAMESPACES_FIELD.values(),
)
KIND_COUNT = len(fields(Facts)) - len(_FIELDS_WITHOUT_LIST)  # the number of kinds that are read


def read_facts(client: KubeClient, namespace: str = names.NAMESPACE) -> Facts:
    """Read the cluster. Raises `errors.Unreachable` only. `namespace`: the namespace of Cardwise."""
    facts = Facts(cardwise_namespace=namespace)
    fill_facts(facts, client, namespace)
    return facts


def fill_facts(facts: Facts, client: KubeClient, namespace: str) -> None:
    """Read the cluster into the fields of `facts`. Raises `errors.Unreachable` only."""
    lists = {
        "nodes": (paths.nodes(), ""),
        "cards": (paths.extendedresources(), ""),
        "classes": (paths.resourceclasses(), ""),
        "daemonsets": (paths.namespaced(_APPS, "daemonsets"), ""),
        "deployments": (paths.namespaced(_APPS, "deployments"), ""),
        "mutating_webhooks": (paths.mutatingwebhookconfigurations(), ""),
        "validating_webhooks": (paths.validatingwebhookconfigurations(), ""),
        "policies": (paths.validatingadmissionpolicies(), ""),
        "policy_bindings": (paths.validatingadmissionpolicybindings(), ""),
        "node_leases": (paths.leases(NODE_LEASES), ""),
        "leases": (paths.leases(namespace), ""),
        "schedulers": (paths.pods(SYSTEM_NAMESPACE), _SCHEDULER_LABEL),
        "controller_managers": (paths.pods(SYSTEM_NAMESPACE), _CONTROLLER_MANAGER_LABEL),
        "device_classes": (_DEVICE_CLASSES_PATH, ""),
        "networkpolicies": (paths.namespaced(_NETWORKING, "networkpolicies", namespace), ""),
        "runtimeclasses": (RUNTIME_CLASSES, ""),
        "resourcequotas": (paths.namespaced("/api/v1", "resourcequotas"), ""),
        "gpuquotas": (paths.gpuquotas(), ""),
        "namespaces": (paths.namespaces(), names.GPU_MEM_UNIT),
        "own_pods": (paths.pods(namespace), _PARTS_SELECTOR),
    }
    queries = {
        kind: (path, {"labelSelector": selector} if selector else {}) for kind, (path, selector) in lists.items()
    }
    queries["pending_pods"] = (paths.pods(), {"fieldSelector": PENDING_SELECTOR})
    queries["own_events"] = (paths.namespaced("/api/v1", "events", namespace), {"fieldSelector": "type=Warning"})
    queries["pod_events"] = (paths.events(), {"fieldSelector": f"reason={names.BOUND_WITHOUT_EXTENDER}"})
    node_event_selector = f"reason={names.GPU_ON_ANOTHER_NODE},involvedObject.kind=Node"
    queries["node_events"] = (paths.events("default"), {"fieldSelector": node_event_selector})
    facts.version, facts.now = client.get("/version"), client.fetch_server_time()
    collect_lists(facts, client, queries)
    # Probe pods of another doctor or of the chart's test are left out: their creators delete them.
    facts.pending_pods = [pod for pod in facts.pending_pods if not pod["metadata"]["name"].startswith(PROBE_POD_PREFIX)]
    with _record_errors(facts, "namespace"):
        facts.namespace = client.get(paths.namespaces(namespace))


def build_part_queries(namespace: str) -> dict[str, tuple[str, Mapping[str, str]]]:
    """Return the path and query of each list in Cardwise's namespace that shows why the node components do not run."""
    return {
        "daemonsets": (paths.namespaced(_APPS, "daemonsets", namespace), {}),
        "own_pods": (paths.pods(namespace), {"labelSelector": _PARTS_SELECTOR}),
        "own_events": (paths.events(namespace), {"fieldSelector": "type=Warning"}),
        "runtimeclasses": (RUNTIME_CLASSES, {}),
    }


def collect_lists(facts: Facts, client: KubeClient, queries: Mapping[str, tuple[str, Mapping[str, str]]]) -> None:
    """Read lists into fields of `facts`. Raises `errors.Unreachable` only.

    queries: path and query of each list, by the name of its field.
    """
    for kind, (path, query) in queries.items():
        with _record_errors(facts, kind):
            objects = list(client.list_objects(path, query))
            if kind in _OTHER_NAMESPACES_FIELD:
                setattr(
                    facts,
                    _OTHER_NAMESPACES_FIELD[kind],
                    [manifest for manifest in objects if not _is_in_namespace(facts.cardwise_namespace, manifest)],
                )
                objects = [manifest for manifest in objects if _is_in_namespace(facts.cardwise_namespace, manifest)]
            setattr(
                facts, kind, [*filter(None, map(podevents.parse_event, objects))] if kind in _EVENT_FIELDS else objects
            )


def _is_in_namespace(namespace: str, manifest: Json) -> bool:
    return bool(manifest["metadata"]["namespace"] == namespace)


@contextmanager
def _record_errors(facts: Facts, kind: str) -> Iterator[None]:
    """Record in `unknown_kinds` or `unread_kinds` that a kind cannot be read. Raises `errors.Unreachable` only."""
    try:
        yield
    except errors.NotFound:
        facts.unknown_kinds.add(kind)
    except errors.Unreachable:
        raise
    except errors.Forbidden:
        facts.unread_kinds[kind] = ""
    except errors.KubeError as error:
        facts.unread_kinds[kind] = error.message


def is_infrastructure(facts: Facts, workload: Json) -> bool:
    """Whether the object is in Cardwise's namespace, or in a namespace of infrastructure by the chart's default values.

    A workload in any other namespace may be a tenant's, whatever its name is.
    """
    return workload["metadata"]["namespace"] in (facts.cardwise_namespace, *bypasses.INFRASTRUCTURE)


def namespaced_name(manifest: Json) -> str:
    """The object's name, as "namespace/name"."""
    return f"{manifest['metadata']['namespace']}/{manifest['metadata']['name']}"


def is_of_chart(manifest: Json) -> bool:
    """Whether the object belongs to the chart, or to a controller of the chart."""
    return labels_of(manifest).get(_NAME_LABEL) == "cardwise"


def is_recent(facts: Facts, event: Event, max_age: timedelta) -> bool:
    """Whether the last repetition of the event is at most `max_age` ago.

    A time more than `max_age` in the future comes from a wrong clock; such an event is not recent either.
    """
    return facts.now is None or abs(facts.now - event.time) < max_age


def nvidia_runtimes(facts: Facts) -> list[tuple[str, str]]:
    """Return name and handler of each of NVIDIA's RuntimeClasses."""
    classes = [
        (runtime_class["metadata"]["name"], str(runtime_class.get("handler", "")))
        for runtime_class in facts.runtimeclasses
    ]
    return [runtime_class for runtime_class in classes if "nvidia" in " ".join(runtime_class)]


def read_configz(client: KubeClient, pod: Json) -> Json | None:
    """Read the configuration of a running kube-scheduler; None if it does not answer the API server's proxy.

    kubeadm binds kube-scheduler to loopback: then only programs on its node can read the configuration.
    """
    name = pod["metadata"]["name"]
    try:
        response = client.get(paths.pods(SYSTEM_NAMESPACE, f"https:{name}:10259", "proxy", "configz"), timeout=5.0)
    except errors.KubeError:
        return None
    configuration = response.get("componentconfig")
    return configuration if isinstance(configuration, dict) else None

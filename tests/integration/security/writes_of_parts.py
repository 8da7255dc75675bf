"""What each part of ours writes, field by field, which `make docs` lists, and what it must not.

Each is one call of the real API server by the part's account, as a dry run; `World` has the objects that it is about.
"""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient, PatchKind

DRY = {"dryRun": "All"}
HOOKS = (paths.mutatingwebhookconfigurations, paths.validatingwebhookconfigurations)
OWN = paths.namespaces(names.NAMESPACE)
LEASES = paths.leases(names.NAMESPACE)


@dataclass(frozen=True, slots=True)
class World:
    """In the namespace: `steady` has a share, `waiting` no node, `gated` a gang, which is the PodGroup `automatic`, and
    `own` is a PodGroup of a person. In ours: the pod `replica`. `node` and `card` are those of a part that runs on a
    node, `other` and `other_card` another's, where the pod `there` runs.
    """

    api: KubeClient
    namespace: str
    node: str
    other: str
    card: str
    other_card: str
    automatic_class: str
    class_of_person: str

    def pod(self, name: str, sub: str = "") -> str:
        """Its path; without a name that of all pods of the namespace."""
        return paths.pods(self.namespace, *filter(None, [name, sub]))

    def group(self, name: str, sub: str = "") -> str:
        """As `pod`, of PodGroups."""
        return paths.podgroups(self.namespace, *filter(None, [name, sub]))


Act = Callable[[KubeClient, World], object]


@dataclass(frozen=True, slots=True)
class Write:
    """The part's account may do this to those fields."""

    verb: str
    subject: str
    fields: str
    acts: Sequence[Act]


@dataclass(frozen=True, slots=True)
class Excess:
    """A call that must be refused, and what the refusal says. `also`: a policy for everybody that refuses it as well.
    The API server tells of one of them, now this one, now that one.
    """

    id: str
    act: Act
    says: str = " cannot "  # RBAC
    also: str = ""


def patched(path: Callable[[World], str], change: Json | list[Json], kind: PatchKind = "merge") -> Act:
    return lambda client, world: client.patch(path(world), change, kind, query=DRY)


def created(path: str | Callable[[World], str], manifest: Json) -> Act:
    def act(client: KubeClient, world: World) -> object:
        try:
            return client.create(path if isinstance(path, str) else path(world), manifest, query=DRY)
        except errors.AlreadyExists:
            return None  # behind all who may refuse

    return act


def deleted(path: Callable[[World], str]) -> Act:
    return lambda client, world: client.delete(path(world), query=DRY)


def hook(change: Callable[[list[Json]], object]) -> Act:
    """The first webhook configuration with its entries changed."""

    def act(client: KubeClient, _: World) -> object:
        path = HOOKS[0](names.WEBHOOK_CONFIGURATION)
        entries = client.get(path)["webhooks"]
        change(entries)
        return client.patch(path, {"webhooks": entries}, query=DRY)

    return act


def labelled(**labels: str) -> Json:
    return {"metadata": {"labels": labels}}


def annotated(key: str, text: str = "x") -> Json:
    return {"metadata": {"annotations": {key: text}}}


def imaged(image: str) -> Json:
    return {"spec": {"containers": [{"name": "main", "image": image}]}}


def secret(name: str) -> Json:
    return {"metadata": {"name": name}, "type": "Opaque"}


def token_of(account: str, name: str) -> Json:
    """A Secret that Kubernetes would write the account's token into."""
    metadata = {"name": name, "annotations": {"kubernetes.io/service-account.name": account}}
    return {"metadata": metadata, "type": "kubernetes.io/service-account-token"}


def of_ours(kind: str, name: str, spec: Json, *, auto: bool = False) -> Json:
    metadata = {"name": name} | ({"labels": {names.AUTO_LABEL: "true"}} if auto else {})
    return {"apiVersion": names.API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}


def resource(node: Callable[[World], str], metadata: Callable[[World], Json] = lambda _: {}, **fields: object) -> Act:
    """A new ExtendedResource of that node."""

    def act(client: KubeClient, world: World) -> object:
        spec = {"node": node(world), "index": 9, "uuid": "GPU-new", "model": "Tesla-P100", "memoryMiB": 16276, **fields}
        manifest = of_ours("ExtendedResource", "gpu-new", spec)
        manifest["metadata"] |= metadata(world)
        return client.create(paths.extendedresources(), manifest, query=DRY)

    return act


def steady(world: World) -> str:
    return world.pod("steady")


def steady_status(world: World) -> str:
    return world.pod("steady", "status")


def node(world: World) -> str:
    return paths.nodes(world.node)


def node_status(world: World) -> str:
    return paths.nodes(world.node, "status")


def card(world: World) -> str:
    return paths.extendedresources(world.card)


def card_status(world: World) -> str:
    return paths.extendedresources(world.card, "status")


def other_card(world: World) -> str:
    return paths.extendedresources(world.other_card)


def without_gate(name: str) -> Json:
    return {"spec": {"schedulingGates": [{"name": name, "$patch": "delete"}]}}


def capacity(**amounts: str | None) -> Json:
    return {"status": {"capacity": amounts, "allocatable": amounts}}


def owner(name: str) -> Json:
    """The Node of this name, made anew, as owner of a card."""
    return {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": name, "uid": "anew"}]}


def own_metadata(world: World) -> Json:
    """The metadata that a device plugin writes."""
    return {"labels": {"model": "other", names.NODE_LABEL: world.node}, **owner(world.node)}


def reported(client: KubeClient, world: World) -> object:
    """Writes what a device plugin reports of a card."""
    change = {"spec": {"memoryMiB": 7, "properties": {"driver": "1"}}, "metadata": own_metadata(world)}
    return client.patch(card(world), change, query=DRY)


ANYBODY = "annotations.cardwise.dev"

EVENT = {"metadata": {"generateName": "x"}, "reason": "x", "message": "x", "type": "Normal"}


def create_event(client: KubeClient, world: World) -> object:
    about = {"involvedObject": {"kind": "Pod", "namespace": world.namespace, "name": "steady"}}
    return client.create(paths.events(world.namespace), EVENT | about, query=DRY)


EVENTS = Write("create, patch", "Events", "all", [create_event])
BUNDLE = base64.b64encode(b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n").decode()
CLASS = {"selector": {"matchLabels": {"model": "Tesla-P100"}}}
ALLOCATED = {"memoryMiB": 1, "corePercent": 0, "shares": 1, "whole": False, "pods": 1}
TERMINATING = [{"podUID": "gone", "namespace": "team", "name": "gone", "memoryMiB": 1}]
BINDING = {"metadata": {"name": "waiting"}, "target": {"apiVersion": "v1", "kind": "Node", "name": "n1"}}
EVICTION = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "steady"}}

MAY: dict[str, Sequence[Write]] = {
    "webhook": [
        Write(
            "patch",
            "its webhook configurations",
            "`webhooks[*].clientConfig.caBundle`",
            [hook(lambda entries: [entry["clientConfig"].update(caBundle=BUNDLE) for entry in entries])],
        ),
        Write(
            "create, update",
            "its Secret (`Opaque`)",
            "all",
            [created(f"{OWN}/secrets", secret("cardwise-webhook-tls"))],
        ),
    ],
    "extender": [
        Write("create", "Bindings", "all", [created(lambda world: world.pod("waiting", "binding"), BINDING)]),
        Write("create", "evictions", "", [created(lambda world: world.pod("steady", "eviction"), EVICTION)]),
        Write("delete", "pods that ask for cards and have none", "", [deleted(lambda world: world.pod("waiting"))]),
        Write(
            "patch",
            "pods",
            "`spec.schedulingGates`: takes `cardwise.dev/gang` away",
            [patched(lambda world: world.pod("gated"), without_gate(names.GANG), "strategic")],
        ),
        Write(
            "patch",
            "pods of its own namespace",
            "label `cardwise.dev/leader`",
            [patched(lambda _: paths.pods(names.NAMESPACE, "replica"), labelled(**{names.LEADER: "true"}))],
        ),
        Write(
            "patch",
            "pods/status",
            "`nominatedNodeName`",
            [patched(lambda world: world.pod("waiting", "status"), {"status": {"nominatedNodeName": "n1"}})],
        ),
        Write(
            "patch",
            "pods/status of waiting pods",
            "annotation `cardwise.dev/leader-epoch`",
            [patched(lambda world: world.pod("waiting", "status"), annotated(names.LEADER_EPOCH))],
        ),
        Write("patch", "nodes", "annotation `cardwise.dev/requeue`", [patched(node, annotated(names.REQUEUE))]),
        Write(
            "patch",
            "ExtendedResources/status",
            "`allocated`, `freeMiB`, `classes`, `terminating`",
            [
                patched(
                    card_status,
                    {"status": {"allocated": ALLOCATED, "freeMiB": 7, "classes": ["a"], "terminating": TERMINATING}},
                )
            ],
        ),
        Write(
            "create, patch, delete",
            "ResourceClasses, PodGroups",
            "`spec` and `metadata` of those with the label `cardwise.dev/auto=true`",
            [
                created(paths.resourceclasses(), of_ours("ResourceClass", "new", CLASS, auto=True)),
                patched(lambda world: paths.resourceclasses(world.automatic_class), {"spec": CLASS}),
                deleted(lambda world: paths.resourceclasses(world.automatic_class)),
                created(lambda world: world.group(""), of_ours("PodGroup", "new", {"minMember": 2}, auto=True)),
                patched(lambda world: world.group("automatic"), {"spec": {"minMember": 4}}),
                deleted(lambda world: world.group("automatic")),
            ],
        ),
        Write(
            "patch",
            "ResourceClasses/status, GPUQuotas/status, PodGroups/status",
            "all",
            [
                patched(
                    lambda world: paths.resourceclasses(world.class_of_person, "status"), {"status": {"devices": 1}}
                ),
                patched(lambda world: world.group("own", "status"), {"status": {"phase": "Running"}}),
            ],
        ),
        Write(
            "create, update",
            "its Secret (`Opaque`), its Lease, its ConfigMap",
            "all",
            [
                created(f"{OWN}/secrets", secret("cardwise-extender-tls")),
                created(LEASES, {"metadata": {"name": names.LEASE}}),
                created(f"{OWN}/configmaps", {"metadata": {"name": names.WORKLOAD}}),
            ],
        ),
        EVENTS,
    ],
    "deviceplugin": [
        Write(
            "patch",
            "pods of its node",
            "annotation `ALIYUN_COM_GPU_MEM_ASSIGNED`",
            [patched(steady, annotated(names.ASSIGNED, "true"))],
        ),
        Write(
            "patch",
            "its Node",
            "label `accelerator`; annotations `cardwise.dev/accelerator`, `cardwise.dev/requeue`",
            [
                patched(node, labelled(accelerator="nvidia-tesla-p100")),
                patched(node, annotated(f"{names.GROUP}/{names.ACCELERATOR}")),
                patched(node, annotated(names.REQUEUE)),
            ],
        ),
        Write(
            "patch",
            "its Node/status",
            "`capacity` and `allocatable` of `aliyun.com/gpu-…` and `cardwise.dev/…`",
            [
                patched(
                    node_status,
                    capacity(**{names.GPU_MEM: "1", names.SHARE: "0", "cardwise.dev/gone": None}),
                    "strategic",
                )
            ],
        ),
        Write(
            "create, patch, delete",
            "ExtendedResources of its node",
            "all but annotations and finalizers; the label `cardwise.dev/node` and the owner are its node; "
            "`spec.unschedulable` and `spec.cordon` only where it creates a card that comes back",
            [
                resource(lambda world: world.node),
                resource(lambda world: world.node, own_metadata, unschedulable=True, cordon={"reason": "a fault"}),
                reported,
                deleted(card),
            ],
        ),
        Write(
            "patch",
            "ExtendedResources/status of its node",
            "`health`, `reason`, `gpuAccess`, `isolation`, `reported`, `mps`",
            [patched(card_status, {"status": {"health": "Unhealthy", "reason": "x", "reported": [], "mps": None}})],
        ),
        EVENTS,
    ],
    "mps": [
        Write(
            "patch",
            "ExtendedResources/status of its node",
            "`mps`",
            [patched(card_status, {"status": {"mps": {"mode": "card", "state": "Down"}}})],
        ),
        Write("create", "evictions, with `mps.audit=evict`", "", []),
        EVENTS,
    ],
}


def _pods(account: str) -> list[Excess]:
    """What no part may write into a pod."""
    return [
        Excess(
            "image", patched(steady, imaged("evil"), "strategic"), f"{account} may not change spec.containers of pods"
        ),
        Excess(
            "tolerations",
            patched(steady, [{"op": "add", "path": "/spec/tolerations/-", "value": {"operator": "Exists"}}], "json"),
            f"{account} may not change spec.tolerations",
        ),
        Excess("deadline", patched(steady, {"spec": {"activeDeadlineSeconds": 1}}), "spec.activeDeadlineSeconds"),
        Excess("label", patched(steady, labelled(app="other")), "metadata.labels[app] of pods"),
        Excess("annotation", patched(steady, annotated("mine")), "metadata.annotations[mine] of pods"),
        Excess("placement", patched(steady, annotated(names.IDX, "7")), f"metadata.annotations[{names.IDX}]", ANYBODY),
        Excess("assignment", patched(steady, annotated(names.ASSIGNMENT, "7")), f"[{names.ASSIGNMENT}]", ANYBODY),
        Excess("finalizer", patched(steady, {"metadata": {"finalizers": ["a.b/c"]}}), "metadata.finalizers"),
        Excess(
            "owner",
            patched(
                steady,
                {"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "x", "uid": "x"}]}},
            ),
            "metadata.ownerReferences",
        ),
        Excess("create a pod", created(lambda world: world.pod(""), {"metadata": {"name": "x"}, "spec": {}})),
    ]


def _nodes(account: str) -> list[Excess]:
    """What no part may write into a Node."""
    taint = {"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}}
    return [
        Excess("taint", patched(node, taint), f"{account} may not change spec.taints of nodes"),
        Excess("unschedulable", patched(node, {"spec": {"unschedulable": True}}), "spec.unschedulable of nodes"),
        Excess("node label", patched(node, labelled(**{"node-restriction.kubernetes.io/a": "b"})), "metadata.labels["),
        Excess(
            "node role", patched(node, labelled(**{"node-role.kubernetes.io/control-plane": ""})), "metadata.labels["
        ),
        Excess("node annotation", patched(node, annotated("a")), "metadata.annotations[a] of nodes"),
        Excess("delete a node", deleted(node)),
    ]


EXTENDER, PLUGIN = "the extender", "the device plugin"
LABELS, OWNERS = "metadata.labels[cardwise.dev/node]: ", "metadata.ownerReferences: "
EXCESS: dict[str, Sequence[Excess]] = {
    "webhook": [
        Excess(
            "rules",
            hook(lambda entries: entries[0]["rules"].append(entries[0]["rules"][0] | {"resources": ["secrets"]})),
            "the webhook may change only clientConfig.caBundle",
        ),
        Excess("policy", hook(lambda entries: entries[0].update(failurePolicy="Ignore")), "caBundle"),
        Excess("conditions", hook(lambda entries: entries[0].update(matchConditions=[])), "caBundle"),
        Excess(
            "selector",
            hook(lambda entries: entries[0].update(namespaceSelector={"matchLabels": {"a": "b"}})),
            "caBundle",
        ),
        Excess("address", hook(lambda entries: entries[0]["clientConfig"].update(url="https://evil:1/")), "caBundle"),
        Excess(
            "a new entry", hook(lambda entries: entries.append(entries[0] | {"name": "new.cardwise.dev"})), "caBundle"
        ),
        Excess("an entry less", hook(lambda entries: entries.pop()), "caBundle"),
        Excess(
            "a label",
            patched(lambda _: HOOKS[1](names.WEBHOOK_CONFIGURATION), labelled(a="b")),
            "the webhook may not change metadata.labels[a]",
        ),
        Excess("another configuration", patched(lambda _: HOOKS[0]("other"), labelled(a="b"))),
        Excess("a Secret", created(f"{OWN}/secrets", secret("other")), "the webhook may create only its own Secret"),
        Excess(
            "another's token",
            created(f"{OWN}/secrets", token_of("cardwise-extender", "cardwise-webhook-tls")),
            "the webhook may create a Secret of type Opaque only",
        ),
        Excess("a pod", patched(steady, labelled(app="other"))),
        Excess("a card", patched(card_status, {"status": {"health": "Unhealthy"}})),
    ],
    "extender": [
        *_pods(EXTENDER),
        Excess("delete a pod", deleted(steady), f"{EXTENDER} may delete only pods that request GPUs and have none"),
        *_nodes(EXTENDER),
        Excess(
            "another gate",
            patched(lambda world: world.pod("gated"), without_gate("other.dev/gate"), "strategic"),
            "the extender may remove only Cardwise's gates",
        ),
        Excess(
            "leader elsewhere",
            patched(steady, labelled(**{names.LEADER: "true"})),
            "the extender may label only its own pods",
        ),
        Excess(
            "phase", patched(steady_status, {"status": {"phase": "Failed"}}), f"{EXTENDER} may not change status.phase"
        ),
        Excess(
            "containers",
            patched(steady_status, {"status": {"containerStatuses": []}}),
            f"{EXTENDER} may not change status.containerStatuses",
        ),
        Excess("addresses", patched(steady_status, {"status": {"podIP": "1.2.3.4"}}), "status.podIP"),
        Excess("label by status", patched(steady_status, labelled(app="other")), "metadata.labels[app] of pods/status"),
        Excess(
            "another epoch",
            patched(steady_status, annotated(names.LEADER_EPOCH)),
            "the leader epoch of waiting pods only",
        ),
        Excess("node status", patched(node_status, capacity(cpu="1"))),
        Excess(
            "health", patched(card_status, {"status": {"health": "Unhealthy"}}), "status.health of extendedresources"
        ),
        Excess("reported", patched(card_status, {"status": {"reported": []}}), "status.reported"),
        Excess("mps", patched(card_status, {"status": {"mps": {"mode": "card", "state": "Down"}}}), "status.mps"),
        Excess("a card", patched(card, {"spec": {"memoryMiB": 1}})),
        Excess(
            "a person's class",
            patched(lambda world: paths.resourceclasses(world.class_of_person), {"spec": {"priority": 9}}),
            "may write only automatic resourceclasses",
        ),
        Excess(
            "a person's class as an automatic one",
            patched(lambda world: paths.resourceclasses(world.class_of_person), labelled(**{names.AUTO_LABEL: "true"})),
            "may write only automatic resourceclasses",
        ),
        Excess("delete it", deleted(lambda world: paths.resourceclasses(world.class_of_person)), "automatic"),
        Excess("a class", created(paths.resourceclasses(), of_ours("ResourceClass", "new", CLASS)), "automatic"),
        Excess(
            "a person's gang",
            patched(lambda world: world.group("own"), {"spec": {"minMember": 9}}),
            "automatic podgroups",
        ),
        Excess("delete that", deleted(lambda world: world.group("own")), "automatic podgroups"),
        Excess(
            "a gang", created(lambda world: world.group(""), of_ours("PodGroup", "new", {"minMember": 2})), "automatic"
        ),
        Excess("a Secret", created(f"{OWN}/secrets", secret("other")), "only its own Secret, ConfigMap and Lease"),
        Excess(
            "another's token",
            created(f"{OWN}/secrets", token_of("cardwise-webhook", "cardwise-extender-tls")),
            "the extender may create a Secret of type Opaque only",
        ),
        Excess(
            "a ConfigMap", created(f"{OWN}/configmaps", {"metadata": {"name": "other"}}), "its own Secret, ConfigMap"
        ),
        Excess("a Lease", created(LEASES, {"metadata": {"name": "other"}}), "only its own Secret, ConfigMap and Lease"),
        Excess("a configuration", patched(lambda _: HOOKS[0](names.WEBHOOK_CONFIGURATION), labelled(a="b"))),
    ],
    "deviceplugin": [
        *_pods(PLUGIN),
        Excess("delete a pod", deleted(steady)),
        *_nodes(PLUGIN),
        Excess(
            "a gate",
            patched(lambda world: world.pod("gated"), without_gate(names.GANG), "strategic"),
            "may not write objects of node",
            "gangs.cardwise.dev",
        ),
        Excess(
            "a pod elsewhere",
            patched(lambda world: world.pod("there"), annotated(names.ASSIGNED, "true")),
            "may not write objects of node",
        ),
        Excess("pod status", patched(steady_status, {"status": {"phase": "Failed"}})),
        Excess(
            "another node",
            patched(lambda world: paths.nodes(world.other), annotated(names.REQUEUE)),
            "objects of node",
        ),
        Excess(
            "its conditions", patched(node_status, {"status": {"conditions": []}}), "status.conditions of nodes/status"
        ),
        Excess(
            "its cpu", patched(node_status, capacity(cpu="999"), "strategic"), "status.capacity[cpu] of nodes/status"
        ),
        Excess("NVIDIA's", patched(node_status, capacity(**{names.NVIDIA_GPU: "9"}), "strategic"), "[nvidia.com/gpu]"),
        Excess("its address", patched(node_status, {"status": {"addresses": []}}), "status.addresses"),
        Excess("its label by status", patched(node_status, labelled(a="b")), "metadata.labels[a] of nodes/status"),
        Excess("a cordon", patched(card, {"spec": {"unschedulable": True}}), "spec.unschedulable of extendedresources"),
        Excess("a mark on a card", patched(card, annotated("a")), "metadata.annotations[a] of extendedresources"),
        Excess("a card that stays", patched(card, {"metadata": {"finalizers": ["a.b/c"]}}), "metadata.finalizers"),
        Excess("a card elsewhere", patched(other_card, {"spec": {"memoryMiB": 1}}), "may not write objects of node"),
        Excess("its move", patched(card, {"spec": {"node": "elsewhere"}}), "may not write objects of node elsewhere"),
        Excess("delete it", deleted(other_card), "may not write objects of node"),
        Excess("create one", resource(lambda world: world.other), "may not write objects of node"),
        Excess(
            "another's label",
            lambda client, world: client.patch(
                card(world), labelled(**{names.NODE_LABEL: world.other}), "merge", query=DRY
            ),
            LABELS,
        ),
        Excess(
            "create with it",
            resource(lambda world: world.node, lambda world: labelled(**{names.NODE_LABEL: world.other})["metadata"]),
            LABELS,
        ),
        Excess(
            "another owner",
            lambda client, world: client.patch(card(world), {"metadata": owner(world.other)}, query=DRY),
            OWNERS,
        ),
        Excess("create with it as well", resource(lambda world: world.node, lambda world: owner(world.other)), OWNERS),
        Excess(
            "create one that stays",
            resource(lambda world: world.node, lambda _: {"finalizers": ["a.b/c"]}),
            "may not set them at creation",
        ),
        Excess(
            "create one with a mark",
            resource(lambda world: world.node, lambda _: {"annotations": {"a": "b"}}),
            "may not set them at creation",
        ),
        Excess(
            "allocated", patched(card_status, {"status": {"allocated": ALLOCATED}}), "status.allocated of extendedres"
        ),
        Excess("free", patched(card_status, {"status": {"freeMiB": 9}}), "status.freeMiB"),
        Excess("terminating", patched(card_status, {"status": {"terminating": TERMINATING}}), "status.terminating"),
        Excess("classes", patched(card_status, {"status": {"classes": ["a"]}}), "status.classes"),
        Excess("a class", patched(lambda world: paths.resourceclasses(world.automatic_class), {"spec": CLASS})),
        Excess("evict", created(lambda world: world.pod("steady", "eviction"), EVICTION)),
    ],
    "mps": [
        Excess(
            "health",
            patched(card_status, {"status": {"health": "Unhealthy"}}),
            "may change only status.mps of its GPUs",
        ),
        Excess(
            "reported", patched(card_status, {"status": {"reported": []}}), "may change only status.mps of its GPUs"
        ),
        Excess("allocated", patched(card_status, {"status": {"allocated": ALLOCATED}}), "status.allocated"),
        Excess(
            "a card elsewhere",
            patched(lambda world: paths.extendedresources(world.other_card, "status"), {"status": {"mps": None}}),
            "the MPS manager of node",
        ),
        Excess("a card's spec", patched(card, {"spec": {"memoryMiB": 1}})),
        Excess("a pod", patched(steady, annotated(names.ASSIGNED, "true"))),
        Excess("a node", patched(node, annotated(names.REQUEUE))),
    ],
}

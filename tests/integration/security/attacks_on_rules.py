"""Ways to a bigger share, past the scheduler, past quotas and to rights. `make docs` lists all attacks.

`steady` is a pod of the tenant's that runs with a share, `idle` one that asks for nothing, `gated` one that waits in a
gang that is not whole, `ungated` one that no node suits. What has `late` is a pod that may run or wait: test_tenant.py
looks what came of it.
"""

from collections.abc import Callable

from cardwise.core.api import names
from cardwise.kube import paths
from tests.build import P100, container
from tests.integration.security.attacks_on_cards import ANOTHER_CARD, FORGED, PAST_CARDWISE
from tests.integration.security.tenancy import (
    RBAC_PATH,
    Attack,
    By,
    Json,
    Tenant,
    Try,
    amount,
    binds,
    bound,
    bound_at_last,
    changed,
    created,
    creates,
    one_container,
    ours,
    patches,
    plain,
    with_env,
    with_spec,
)

MEM = f"spec.containers[0].resources.limits[{names.GPU_MEM}]"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
SCHEDULING = "/apis/scheduling.k8s.io/v1"
EXTENDER = f"system:serviceaccount:{names.NAMESPACE}:cardwise-extender"
SYSTEM = paths.namespaces(names.NAMESPACE)


def _fatten(write: str, metadata: Json) -> Callable[[Tenant], object]:
    """A PodGroup with this in its metadata, from the beginning or later."""

    def act(tenant: Tenant) -> object:
        path = paths.podgroups(tenant.space.name)
        podgroup: Json = {"apiVersion": names.API_VERSION, "kind": "PodGroup", "spec": {"minMember": 2}}
        if write == "created":
            return tenant.edit.create(path, podgroup | {"metadata": {"name": "fat"} | metadata})
        tenant.edit.create(path, podgroup | {"metadata": {"name": "fat"}})
        try:
            return tenant.edit.patch(f"{path}/fat", {"metadata": metadata})
        finally:
            tenant.edit.delete(f"{path}/fat")

    return act


ENDED = {
    "name": "main",
    "image": "x",
    "imageID": "",
    "ready": False,
    "restartCount": 0,
    "state": {"terminated": {"exitCode": 0}},
}

BIGGER_SHARE = (
    Attack(
        "T24",
        "other limits for a pod that runs",
        [
            patches(
                "steady",
                {"spec": {"containers": [{"name": "main", "resources": {"limits": {names.GPU_MEM: "9000"}}}]}},
                By.KUBERNETES,
                "pod updates may not change fields other than",
            )
        ],
    ),
    Attack(
        "T25",
        "other limits by the subresource `resize`",
        [
            patches(
                "steady",
                {"spec": {"containers": [{"name": "main", "resources": {"limits": {names.GPU_MEM: "9000"}}}]}},
                By.RBAC,
                "pods/resize",
                sub="resize",
            ),
            patches(
                "steady",
                {
                    "spec": {
                        "containers": [
                            {
                                "name": "main",
                                "resources": {"limits": {names.GPU_MEM: "9000"}, "requests": {names.GPU_MEM: "9000"}},
                            }
                        ]
                    }
                },
                By.KUBERNETES,
                "only cpu and memory resources are mutable",
                sub="resize",
                as_debugger=True,
            ),
        ],
        since=33,
    ),
    Attack(
        "T26",
        "amounts that overflow, are negative or too small to see",
        [
            creates(amount("1e30"), By.WEBHOOK, MEM),
            creates(amount("9223372036854775807"), By.WEBHOOK, MEM),
            creates(amount("16Ei"), By.WEBHOOK, MEM),
            creates(amount("-8138"), By.WEBHOOK, MEM),
            creates(amount("1m"), By.WEBHOOK, MEM),
            creates(amount("0"), By.WEBHOOK, MEM),
            creates(
                amount("9" * 5000),
                By.WEBHOOK,
                "object does not have the structure",
                "spec.containers[0].resources.limits",
            ),
            creates(amount("0x10"), By.KUBERNETES, "quantities must match"),
            creates(amount(str(P100 + 1)), By.WEBHOOK, MEM, "more than the largest GPU has"),
            creates(ours(gpu_count=10**9), By.WEBHOOK, f"limits[{names.GPU_COUNT}]", "from 1 to 4096"),
            creates(ours(gpu_core=101), By.WEBHOOK, f"limits[{names.GPU_CORE}]"),
            creates(ours(gpu_core=-1), By.WEBHOOK, f"limits[{names.GPU_CORE}]"),
        ],
    ),
    Attack(
        "T27",
        "the resource by another name: upper case, a prefix, the pod's own resources",
        [
            creates(one_container(resources={"limits": {name: "1"}}), By.KUBERNETES, name)
            for name in (
                "Aliyun.com/gpu-mem",
                "requests.aliyun.com/gpu-mem",
                "aliyun.com/gpu-mem/x",
            )
        ]
        + [creates(with_spec(plain(), resources={"limits": {names.GPU_MEM: "9000"}}), By.KUBERNETES, names.GPU_MEM)],
        since=34,
    ),
    Attack(
        "T28",
        "two amounts: a small request and a large limit, a request alone, an ordinary init container",
        [
            creates(
                one_container(resources={"limits": {names.GPU_MEM: "9000"}, "requests": {names.GPU_MEM: "1"}}),
                By.WEBHOOK,
                f"requests[{names.GPU_MEM}]",
            ),
            creates(one_container(resources={"requests": {names.GPU_MEM: "9000"}}), By.WEBHOOK, MEM, "is missing"),
            creates(
                with_spec(ours(), initContainers=[container("early", gpu_mem=9000)]),
                By.WEBHOOK,
                f"spec.initContainers[0].resources.limits[{names.GPU_MEM}]",
            ),
        ],
    ),
    Attack(
        "T29",
        "a forged split over cards (`cardwise.dev/gpu-counts`)",
        [
            creates(
                ours(gpu_mem=30, share=1, annotations={names.GPU_COUNTS: f"main={count}"}),
                By.WEBHOOK,
                names.GPU_COUNTS,
            )
            for count in ("x", "-1")
        ]
        + [
            creates(
                ours(gpu_mem=30, share=1, annotations={names.GPU_COUNTS: "main=1e30"}),
                By.WEBHOOK,
                names.GPU_COUNTS,
                "from 1 to 4096",
            )
        ],
    ),
    Attack(
        "T63",
        "his share given back early: a forged end in the pod's status",
        [
            patches("steady", {"status": status}, By.STATUS, f"status.{field}", sub="status", as_debugger=True)
            for field, status in (
                ("phase", {"phase": "Failed"}),
                ("phase", {"phase": "Succeeded"}),
                ("containerStatuses", {"containerStatuses": [ENDED]}),
            )
        ],
    ),
    Attack("T30", "his share given back early: deleted by force, made again under the same name", late=[By.NODE]),
)

PAST_THE_SCHEDULER = (
    Attack(
        "T31",
        "`spec.nodeName`",
        [creates(with_spec(ours(), nodeName="n1"), By.NODE_NAME, "spec.nodeName", "nodeAffinity")],
    ),
    Attack(
        "T32",
        "a Binding by hand, also one that names a card, a gang or isolation",
        [
            Try(lambda tenant: bound(tenant, "gated", as_debugger=False), By.RBAC, ("pods/binding",)),
            Try(
                lambda tenant: bound_at_last(tenant, "ungated"),
                By.WEBHOOK,
                ("only the Cardwise extender may bind pods",),
            ),
            Try(
                lambda tenant: bound(tenant, "ungated", as_debugger=True, annotations=FORGED),
                By.BINDINGS,
                (f"metadata.annotations[{names.GPUSHARE_PREFIX}", "leave it out of the Binding"),
            ),
            *(
                binds("idle", key, "1")
                for key in (names.ISOLATION, names.POLICY, names.QUEUE_PRIORITY, names.GROUP_NAME)
            ),
            *(binds("idle", key, "1", "labels") for key in (names.GANG, names.COSCHEDULING)),
        ],
    ),
    Attack(
        "T78",
        "a Binding by hand that makes the pod look static, or names an AppArmor profile",
        [
            binds("idle", key, "unconfined")
            for key in (
                names.MIRROR,
                "kubernetes.io/config.source",
                "kubernetes.io/config.hash",
                "container.apparmor.security.beta.kubernetes.io/main",
            )
        ],
    ),
    Attack(
        "T33",
        "a node claimed by `status.nominatedNodeName`",
        [
            patches("gated", {"status": {"nominatedNodeName": "n1"}}, By.RBAC, "pods/status", sub="status"),
            patches(
                "ungated",
                {"status": {"nominatedNodeName": "n1"}},
                By.STATUS,
                "status.nominatedNodeName",
                sub="status",
                as_debugger=True,
            ),
        ],
    ),
    Attack(
        "T34",
        "a gang's gate taken away, a gang joined or left later",
        [
            patches(
                "gated",
                {"spec": {"schedulingGates": [{"$patch": "delete", "name": names.GANG}]}},
                By.GANGS,
                f"spec.schedulingGates[{names.GANG}]",
            ),
            patches("gated", {"metadata": {"labels": {names.GANG: None}}}, By.GANGS, f"metadata.labels[{names.GANG}]"),
            patches("steady", {"metadata": {"labels": {names.GANG: "x"}}}, By.GANGS, f"metadata.labels[{names.GANG}]"),
        ],
    ),
    Attack("T35", "cards held by a gang that is never whole", late=[By.EXTENDER]),
    Attack(
        "T64",
        "gangs that keep others waiting: too many kinds of pods, or a gate of his own",
        late=[By.EXTENDER],
    ),
    Attack(
        "T36",
        "the status of a PodGroup",
        [
            changed(
                lambda tenant: paths.podgroups(tenant.space.name, "held", "status"),
                By.RBAC,
                "podgroups/status",
                status={"phase": "Running"},
            ),
            Try(
                lambda tenant: tenant.debugger.patch(
                    paths.podgroups(tenant.space.name, "held", "status"), {"status": {"phase": "Running"}}
                ),
                By.PODGROUPS,
                ("status: only the Cardwise extender",),
            ),
        ],
    ),
    Attack("T37", "the extender called by hand", late=[By.EXTENDER]),
    Attack(
        "T65",
        "a Binding by hand while the webhook does not answer in time",
        late=[By.EXTENDER],
    ),
    Attack(
        "T38",
        "a higher priority: a PriorityClass of his own, one of the system's",
        [
            created(f"{SCHEDULING}/priorityclasses", By.RBAC, "priorityclasses", value=1000000),
            creates(with_spec(ours(), priority=2000001000), By.KUBERNETES, "the integer value of priority"),
            creates(with_spec(ours(), priorityClassName="system-node-critical"), By.QUOTA, "critical", guarded=True),
        ],
    ),
    Attack("T39", "all of it in the template of a Deployment", late=[By.ENVIRONMENT]),
    Attack(
        "T52",
        "a PodGroup with a `timeoutSeconds` of an hour",
        [
            created(
                lambda tenant: paths.podgroups(tenant.space.name),
                By.PODGROUPS,
                "spec.timeoutSeconds",
                apiVersion=names.API_VERSION,
                kind="PodGroup",
                spec={"minMember": 2, "timeoutSeconds": 3600},
            ),
            changed(
                lambda tenant: paths.podgroups(tenant.space.name, "held"),
                By.PODGROUPS,
                "for at most 300 seconds",
                spec={"timeoutSeconds": 3600},
            ),
        ],
    ),
    Attack(
        "T75",
        "a gang of a few MiB that waits long, so that whole cards or nodes are kept for it",
        late=[By.EXTENDER],
    ),
    Attack("T76", "the same on nodes that lack cpu for it", late=[By.EXTENDER]),
)

QUOTAS_AND_RIGHTS = (
    Attack(
        "T40",
        "a ResourceQuota in other words: units, several containers, sidecars, split shares",
        [
            creates(manifest, By.QUOTA, f"requests.{names.GPU_MEM}=", guarded=True)
            for manifest in (
                amount("9Gi"),
                with_spec(
                    ours(gpu_mem="8Gi"), initContainers=[container("s", gpu_mem=1) | {"restartPolicy": "Always"}]
                ),
                with_spec(plain(), containers=[container(f"c{i}", gpu_mem="3Gi") for i in range(3)]),
                ours(gpu_mem="10Gi", gpu_count=2),
            )
        ],
    ),
    Attack(
        "T41",
        "a GPUQuota: exceeded by a share or a whole card; changed or deleted",
        [
            creates(ours(gpu_mem="13Gi"), By.WEBHOOK, "GPUQuota", "memoryMiB requested 13312", guarded=True),
            creates(
                with_spec(plain(), containers=[container(whole_gpu=1)]),
                By.WEBHOOK,
                "GPUQuota",
                f"memoryMiB requested {P100}",
                guarded=True,
            ),
            created(lambda tenant: paths.gpuquotas(tenant.space.name), By.RBAC, "gpuquotas", spec={"quotas": []}),
            changed(
                lambda tenant: paths.gpuquotas(tenant.guarded.name, "cards"), By.RBAC, "gpuquotas", spec={"quotas": []}
            ),
            Try(
                lambda tenant: tenant.edit.delete(paths.gpuquotas(tenant.guarded.name, "cards")),
                By.RBAC,
                ("gpuquotas",),
            ),
        ],
    ),
    Attack(
        "T42",
        "a ResourceQuota or LimitRange changed or deleted",
        [
            Try(
                lambda tenant: tenant.edit.delete(f"{paths.namespaces(tenant.guarded.name)}/resourcequotas/cards"),
                By.RBAC,
                ("resourcequotas",),
            ),
            created(
                lambda tenant: tenant.path_of("limitranges"),
                By.RBAC,
                "limitranges",
                spec={"limits": [{"type": "Container"}]},
            ),
        ],
    ),
    Attack(
        "T43",
        "a type of his own: ResourceClass, ExtendedResource",
        [
            created(paths.resourceclasses(), By.RBAC, "resourceclasses", spec={}),
            changed(paths.resourceclasses("nvidia.tesla-p100"), By.RBAC, "resourceclasses", spec={"priority": 1}),
            created(paths.extendedresources(), By.RBAC, "extendedresources", spec={}),
            changed(paths.extendedresources("x", "status"), By.RBAC, "extendedresources", status={"health": "Healthy"}),
        ],
    ),
    Attack(
        "T44",
        "defaults: labels and annotations of his namespace, Pod Security's among them",
        [
            changed(
                lambda tenant: paths.namespaces(tenant.guarded.name),
                By.RBAC,
                "namespaces",
                metadata={
                    "labels": {names.DEFAULTS_LABEL: "enabled", "pod-security.kubernetes.io/enforce": "privileged"}
                },
            )
        ],
    ),
    Attack(
        "T45",
        "what is exempt: a namespace of the infrastructure, or its ServiceAccount",
        [
            created("/api/v1/namespaces/kube-system/pods", By.RBAC, "pods", spec=plain()["spec"]),
            created(f"{SYSTEM}/pods", By.RBAC, "pods", spec=plain()["spec"]),
            creates(with_spec(plain(), serviceAccountName="cardwise-extender"), By.KUBERNETES, "serviceaccount"),
        ],
    ),
    Attack(
        "T46",
        "being Cardwise: its tokens, its Secrets, impersonation",
        [
            created(f"{SYSTEM}/serviceaccounts/cardwise-extender/token", By.RBAC, "serviceaccounts/token", spec={}),
            Try(lambda tenant: tenant.edit.get(f"{SYSTEM}/secrets"), By.RBAC, ("secrets",)),
            Try(lambda tenant: tenant.posing(EXTENDER), By.RBAC, ("impersonate",)),
        ],
    ),
    Attack(
        "T47",
        "the rules themselves: policies, webhooks, roles",
        [
            Try(
                lambda tenant: tenant.edit.delete(
                    f"{ADMISSION}/validatingadmissionpolicybindings/annotations.cardwise.dev"
                ),
                By.RBAC,
                ("validatingadmissionpolicybindings",),
            ),
            Try(
                lambda tenant: tenant.edit.delete(paths.mutatingwebhookconfigurations(names.WEBHOOK_CONFIGURATION)),
                By.RBAC,
                ("mutatingwebhookconfigurations",),
            ),
            created(
                lambda tenant: tenant.path_of("rolebindings", base=RBAC_PATH),
                By.RBAC,
                "rolebindings",
                roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cardwise-extender"},
            ),
        ],
    ),
    Attack(
        "T48",
        "Nodes: an annotation, a capacity",
        [
            changed(paths.nodes("n1"), By.RBAC, "nodes", metadata={"annotations": {names.REQUEUE: "1"}}),
            changed(paths.nodes("n1", "status"), By.RBAC, "nodes/status", status={"capacity": {names.GPU_MEM: "1"}}),
        ],
    ),
    Attack(
        "T53",
        "a namespace by the name of an exempt one that is not there",
        [
            Try(
                lambda tenant, manifest={"metadata": {"name": name}}: tenant.debugger.create(
                    paths.namespaces(), manifest
                ),
                By.NAMESPACES,
                (f"a namespace called {name}", "choose another name"),
            )
            for name in ("dcgm", "nvidia-device-plugin", "gpu-operator")
        ],
    ),
    Attack(
        "T66",
        "a unit of bare numbers in a namespace of his own",
        [
            Try(
                lambda tenant: tenant.debugger.create(
                    paths.namespaces(), {"metadata": {"name": "own-unit", "labels": {names.GPU_MEM_UNIT: "GiB"}}}
                ),
                By.GPU_MEM_UNIT,
                (names.GPU_MEM_UNIT, "only users who may update ValidatingAdmissionPolicies can change it"),
            )
        ],
    ),
    Attack(
        "T50",
        "many shares of 64 MiB, within the memory that his quotas allow",
        [
            creates(
                with_spec(plain(), containers=[container(f"c{i}", gpu_mem=64) for i in range(17)]),
                By.WEBHOOK,
                "GPUQuota",
                "shares requested 17",
                guarded=True,
            )
        ],
    ),
    Attack("T54", "the webhook asked by hand, for quotas and gangs of other namespaces", late=[By.WEBHOOK]),
)

CARDWISE_ITSELF = (
    Attack(
        "T56",
        "many connections that say nothing, or a byte at a time",
        late=[By.EXTENDER, By.WEBHOOK],
    ),
    Attack(
        "T70",
        "heads of thousands of header lines",
        late=[By.WEBHOOK],
    ),
    Attack(
        "T71",
        "refusals that quote 120 KB, until the log has filled the node's disk",
        [
            creates(
                ours(annotations={names.POLICY: "x" * 120_000}),
                By.WEBHOOK,
                "(120000 characters) is not a placement policy",
                "write one of",
            )
        ],
    ),
    Attack(
        "T60",
        "a waiting pod grown by an update until no write of the extender fits",
        [
            patches("ungated", {"metadata": {field: content}}, By.ANNOTATIONS, f"metadata.{field}", "at most")
            for field, content in (
                ("annotations", {"x": "x" * 132_000}),
                ("annotations", {"x": "é" * 66_000}),
                ("annotations", {f"x{i}": "" for i in range(600)}),
                ("labels", {f"x{i}": "" for i in range(600)}),
                ("finalizers", [f"a.b/x{i}" for i in range(600)]),
                ("ownerReferences", [{"apiVersion": "v1", "kind": "Pod", "name": "x" * 132_000, "uid": "1"}]),
            )
        ]
        + [
            patches(
                "ungated",
                {"spec": {"tolerations": [{"key": f"x{i}", "operator": "Exists"} for i in range(600)]}},
                By.ANNOTATIONS,
                "spec.tolerations",
                "at most",
            )
        ],
    ),
    Attack(
        "T61",
        "fat PodGroups, which delay writes to those of other tenants",
        [
            Try(_fatten(write, {field: content}), By.PODGROUPS, ("metadata", "at most"))
            for write in ("created", "changed")
            for field, content in (
                ("labels", {f"x{i}": "" for i in range(1_000)}),
                ("annotations", {f"x{i}": "" for i in range(100)}),
                ("annotations", {"x": "x" * 33_000}),
                ("finalizers", [f"a.b/x{i}" for i in range(100)]),
                ("ownerReferences", [{"apiVersion": "v1", "kind": "ConfigMap", "name": "x" * 33_000, "uid": "1"}]),
            )
        ],
    ),
    Attack(
        "T59",
        "`metadata.managedFields` of a pod, nested more than a thousand levels deep",
        late=[By.EXTENDER],
    ),
    Attack(
        "T67",
        "the webhook asked by hand about names that are other URLs of the API server",
        late=[By.WEBHOOK],
    ),
    Attack(
        "T79",
        "the webhook asked by hand about what takes long to judge: thousands of names, hundreds of "
        "templates or conditions",
        late=[By.WEBHOOK],
    ),
    Attack(
        "T80",
        "slow reviews from one address until no thread of the webhook is left",
        late=[By.WEBHOOK],
    ),
    Attack(
        "T62",
        "many parallel reviews, by dry run, of the largest pods",
        late=[By.WEBHOOK],
    ),
    Attack(
        "T49",
        "a pod of thousands of unknown classes, containers, annotations, variables or gates",
        [
            creates(manifest, By.WEBHOOK, says)
            for manifest, says in (
                (one_container(resources={"limits": {f"no.class-{i}": "1" for i in range(5000)}}), "5000 different"),
                (
                    with_spec(plain(), containers=[container(f"c{i}", gpu_mem=64) for i in range(2000)]),
                    "too much to check for GPU requests",
                ),
                (ours(annotations={f"{names.GPUSHARE_PREFIX}{i}": "" for i in range(5000)}), "5000 are too many"),
                (with_env(ours(), **{f"CUDA_MPS_{i}": "1" for i in range(5000)}), "spec.containers[0].env: more than"),
                (
                    with_spec(ours(), schedulingGates=[{"name": f"n{i}"} for i in range(5000)]),
                    "spec.schedulingGates: 5000 are too many",
                ),
            )
        ],
    ),
)

ATTACKS_BY_AIM = {
    "A card past Cardwise": PAST_CARDWISE,
    "Another card": ANOTHER_CARD,
    "A bigger share": BIGGER_SHARE,
    "Past the scheduler": PAST_THE_SCHEDULER,
    "Quotas, types and others' rights": QUOTAS_AND_RIGHTS,
    "Cardwise itself": CARDWISE_ITSELF,
}

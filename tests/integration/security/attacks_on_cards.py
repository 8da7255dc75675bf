"""Ways to a card past Cardwise, and to another card. `make docs` lists all attacks.

`steady` is a pod of the tenant's that runs with a share, `idle` one that asks for nothing, `gated` one that waits in a
gang that is not whole, `ungated` one that no node suits. What has `late` is a pod that may run or wait: test_tenant.py
looks what came of it.
"""

from cardwise.core.api import names
from tests.build import container
from tests.integration.security.tenancy import (
    Attack,
    By,
    Json,
    annotated,
    binds,
    created,
    creates,
    debugged,
    one_container,
    ours,
    patches,
    plain,
    with_env,
    with_host_path,
    with_spec,
)

DEVICES = names.ENV_VISIBLE_DEVICES
OF_NVIDIA = "nvidia-cdi"  # a RuntimeClass that the policy knows; nodes without NVIDIA's runtime have it from runc here
PIPE = "CUDA_MPS_PIPE_DIRECTORY"
FORGED = {names.IDX: "1", names.POD_MEM: "16276", names.ASSIGNED: "true"}
DRA = "/apis/resource.k8s.io/v1"
PRIVILEGED = {"securityContext": {"privileged": True}}


def listing(path: str, field: str = "containers") -> Json:
    """A pod that names devices to NVIDIA's runtime by a mount at `path`."""
    manifest = with_host_path(plain(), "/dev/null")
    mounting = container("lister") | {"volumeMounts": [{"name": "host", "mountPath": path}]}
    manifest["spec"].setdefault(field, []).append(mounting)
    return manifest


PAST_CARDWISE = (
    Attack(
        "T01",
        "`NVIDIA_VISIBLE_DEVICES=all` in a container, an init container or a sidecar",
        [
            creates(with_env(plain(), **{DEVICES: "all"}), By.ENVIRONMENT, "spec.containers[main].env", DEVICES),
            creates(
                with_env(plain(), field="initContainers", **{DEVICES: "0"}),
                By.ENVIRONMENT,
                "spec.initContainers[early].env",
            ),
        ],
    ),
    Attack(
        "T02",
        "`NVIDIA_VISIBLE_DEVICES` by a reference: to a label, a ConfigMap, Cardwise's annotation without a share",
        [
            creates(with_env(plain(), **{DEVICES: reference}), By.ENVIRONMENT, DEVICES)
            for reference in (
                {"fieldRef": {"fieldPath": "metadata.labels['mine']"}},
                {"configMapKeyRef": {"name": "stolen", "key": DEVICES}},
                {"fieldRef": {"fieldPath": f"metadata.annotations['{names.DEVICES_OF}0']"}},
            )
        ],
    ),
    Attack(
        "T03",
        "`CUDA_MPS_*`: another daemon's pipe, no limits",
        [
            creates(with_env(plain(), **{PIPE: "/run/cardwise/mps"}), By.ENVIRONMENT, "spec.containers[main].env"),
            creates(with_env(plain(), CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=99999M"), By.ENVIRONMENT, "CUDA_MPS_*"),
        ],
    ),
    Attack(
        "T77",
        "`NVIDIA_GPU_MEMORY_REQUEST` and `NVIDIA_GPU_MEMORY_LIMIT`: in a container, beside a share, by `kubectl debug`",
        [
            creates(
                with_env(plain(), field=field, **{f"NVIDIA_GPU_MEMORY_{bound}": "16276"}),
                By.ENVIRONMENT,
                f"spec.{field}[{name}].env",
                "NVIDIA_GPU_MEMORY_*",
            )
            for field, name, bound in (
                ("containers", "main", "LIMIT"),
                ("containers", "main", "REQUEST"),
                ("initContainers", "early", "LIMIT"),
            )
        ]
        + [
            patches(
                "steady",
                debugged(env=[{"name": "NVIDIA_GPU_MEMORY_REQUEST", "value": "16276"}]),
                By.ENVIRONMENT,
                "spec.ephemeralContainers[debug].env",
                sub="ephemeralcontainers",
                as_debugger=True,
            )
        ],
        late=[By.WEBHOOK],
    ),
    Attack(
        "T04", "the same by `envFrom`, beside a share, with `CARDWISE_*` and `ALIYUN_COM_GPU_MEM_*`", late=[By.NODE]
    ),
    Attack("T05", "the same by `envFrom`, in a pod without a share", late=[By.NODE]),
    Attack(
        "T06",
        "an ephemeral container (`kubectl debug`) with such environment or `envFrom`",
        [
            patches("steady", debugged(), By.RBAC, "pods/ephemeralcontainers", sub="ephemeralcontainers"),
            patches(
                "steady",
                debugged(env=[{"name": DEVICES, "value": "all"}]),
                By.ENVIRONMENT,
                "spec.ephemeralContainers[debug].env",
                sub="ephemeralcontainers",
                as_debugger=True,
            ),
            patches(
                "steady",
                debugged(envFrom=[{"configMapRef": {"name": "stolen"}}]),
                By.ENVIRONMENT,
                "spec.ephemeralContainers[debug].envFrom",
                sub="ephemeralcontainers",
                as_debugger=True,
            ),
        ],
    ),
    Attack(
        "T07",
        "an ephemeral container with device nodes beside the container that has the card",
        late=[By.NODE],
    ),
    Attack("T08", "`mknod` of another card's device in a container that has a share", late=[By.NODE]),
    Attack(
        "T09",
        "hostPath of a card's device, in disguise or by /proc, of CDI's folders, of Cardwise's state and pipes",
        [
            creates(with_host_path(plain(), path), By.HOST_PATHS, "spec.volumes[host].hostPath.path", path)
            for path in (
                "/dev/nvidia0",
                "//dev/./nvidiactl",
                "/var/run/cdi",
                "/var/lib/cardwise",
                "/run/cardwise/mps",
                "/dev/char/195:0",
                "/proc/1/root/dev/nvidia0",
                "/proc/self/root",
                "/dev/fd/3",
            )
        ],
    ),
    Attack(
        "T10",
        "hostPath of a folder that holds them, in a pod with a share",
        [
            creates(with_host_path(ours(), path), By.HOST_PATHS, "spec.volumes[host].hostPath.path", path)
            for path in ("/", "/dev", "/run", "/var/lib", "/etc")
        ],
    ),
    Attack("T11", "hostPath of the folder with the device nodes, in a pod without a share", late=[By.NODE]),
    Attack(
        "T12",
        "hostPath of `/dev` or `/var/lib/kubelet`, `privileged`, `hostPID`, `hostIPC`, under Pod Security",
        [
            *(
                creates(with_host_path(plain(), path), By.POD_SECURITY, "hostPath", guarded=True)
                for path in ("/dev", "/var/lib/kubelet")
            ),
            creates(one_container(**PRIVILEGED), By.POD_SECURITY, "privileged", guarded=True),
            creates(with_spec(plain(), hostPID=True), By.POD_SECURITY, "hostPID", guarded=True),
            creates(with_spec(plain(), hostIPC=True), By.POD_SECURITY, "hostIPC", guarded=True),
        ],
    ),
    Attack(
        "T13",
        "CDI devices by annotation (`cdi.k8s.io/…`, `nvidia.cdi.k8s.io/…`), at creation, later, or in a Binding",
        [
            creates(
                plain(annotations={"cdi.k8s.io/mine": device}),
                By.ANNOTATIONS,
                "metadata.annotations[cdi.k8s.io/mine]",
                names.GPU_MEM,
            )
            for device in (
                f"{names.CDI_KIND}=0",
                "nvidia.com/gpu=all",
                "vendor.com/nic=0,runtime.nvidia.com/gpu=0",
                "all",  # of NVIDIA's kind, to its runtime on CRI-O
                "0",
                "vendor.com/nic=0,1",
            )
        ]
        + [
            creates(plain(annotations={key: "nvidia.com/gpu=all"}), By.ANNOTATIONS, f"metadata.annotations[{key}]")
            for key in ("nvidia.cdi.k8s.io", "nvidia.cdi.k8s.io/pod", "nvidia.cdi.k8s.io/container.main")
        ]
        + [
            creates(
                plain(
                    annotations={f"cdi.k8s.io/{i}": "vendor.com/net=a" for i in range(600)} | {"cdi.k8s.io/x": "all"}
                ),
                By.ANNOTATIONS,
                "metadata.annotations[cdi.k8s.io]",
            ),
            patches(
                "idle",
                annotated(**{"cdi.k8s.io/mine": "nvidia.com/gpu=all"}),
                By.ANNOTATIONS,
                "metadata.annotations[cdi.k8s.io/mine]",
            ),
        ]
        + [
            binds("idle", key, "nvidia.com/gpu=all", field)
            for key in ("cdi.k8s.io/mine", "nvidia.cdi.k8s.io", "nvidia.cdi.k8s.io/pod")
            for field in ("annotations", "labels")
        ],
    ),
    Attack(
        "T14",
        "a runtime of his own: a RuntimeClass, or the name of none",
        [
            created("/apis/node.k8s.io/v1/runtimeclasses", By.RBAC, "runtimeclasses", handler="nvidia"),
            creates(with_spec(plain(), runtimeClassName="nvidia"), By.KUBERNETES, 'RuntimeClass "nvidia" not found'),
        ],
    ),
    Attack(
        "T15",
        "a card as a raw block volume (`volumeDevices`)",
        [
            created(
                "/api/v1/persistentvolumes",
                By.RBAC,
                "persistentvolumes",
                spec={
                    "capacity": {"storage": "1Gi"},
                    "accessModes": ["ReadWriteOnce"],
                    "volumeMode": "Block",
                    "local": {"path": "/dev/nvidia0"},
                },
            )
        ],
    ),
    Attack(
        "T16",
        "a card by a DeviceClass, a ResourceSlice, a claim",
        [
            created(f"{DRA}/deviceclasses", By.RBAC, "deviceclasses", spec={}),
            created(f"{DRA}/resourceslices", By.RBAC, "resourceslices", spec={}),
        ],
        late=[By.KUBERNETES],
    ),
    Attack(
        "T51",
        "`/dev/null` at `/var/run/nvidia-container-devices/all`, also by a debug container",
        [
            *(
                creates(listing(path), By.HOST_PATHS, "/var/run/nvidia-container-devices")
                for path in (
                    "/var/run/nvidia-container-devices/all",
                    "//var/./run/nvidia-container-devices/0",
                    "/tmp/../var/run/nvidia-container-devices/all",
                )
            ),
            creates(listing("/var/run/nvidia-container-devices/all", "initContainers"), By.HOST_PATHS, "volumeMounts"),
            patches(
                "idle",
                debugged(volumeMounts=[{"name": "null", "mountPath": "/var/run/nvidia-container-devices/all"}]),
                By.HOST_PATHS,
                "volumeMounts",
                sub="ephemeralcontainers",
                as_debugger=True,
            ),
        ],
    ),
    Attack(
        "T57",
        "NVIDIA's runtime without a share: with 0 of its cards, with `spec.nodeName`, in a container "
        "beside, in a debug container",
        [
            *(
                creates(with_spec(manifest, runtimeClassName=OF_NVIDIA), By.RUNTIME_CLASSES, "spec.runtimeClassName")
                for manifest in (
                    plain(),
                    one_container(envFrom=[{"configMapRef": {"name": "stolen"}}]),
                    one_container(resources={"limits": {names.NVIDIA_GPU: "0"}}),
                    one_container(resources={"limits": {"nvidia.com/hostdev": "1"}}),
                    one_container(resources={"limits": {"nvidia.com/gpu-more": "1"}}),
                    with_spec(one_container(resources={"limits": {names.NVIDIA_GPU: "1"}}), nodeName="n1"),
                )
            ),
            *(
                creates(
                    with_spec(
                        plain(),
                        runtimeClassName=OF_NVIDIA,
                        containers=[container() | {"resources": {"limits": {resource: "1"}}}, container("other") | env],
                    ),
                    By.RUNTIME_CLASSES,
                    "spec.containers[other].env",
                )
                for resource in (names.NVIDIA_GPU, "nvidia.com/gpu.shared", "nvidia.com/mig-1g.5gb")
                for env in ({}, {"env": [{"name": DEVICES, "value": device_list} for device_list in ("void", "none")]})
            ),
            patches(
                "sharing",
                debugged(),
                By.RUNTIME_CLASSES,
                "spec.ephemeralContainers[debug].env",
                sub="ephemeralcontainers",
                as_debugger=True,
            ),
        ],
    ),
    Attack(
        "T58",
        "a container, init container or sidecar beside one with a share, whose image or `envFrom` asks for all cards",
        late=[By.WEBHOOK],
    ),
)

ANOTHER_CARD = (
    Attack(
        "T17",
        "placement annotations in a pod that asks for nothing",
        [
            creates(
                plain(annotations={key: device_list}), By.ANNOTATIONS, f"metadata.annotations[{key}]", "leave it out"
            )
            for key, device_list in (
                (names.IDX, "0"),
                (names.ASSIGNMENT, "{}"),
                (f"{names.DEVICES_OF}0", "GPU-x"),
                (names.GPUSHARE_ALLOCATION, "{}"),
            )
        ],
    ),
    Attack(
        "T18",
        "placement annotations beside a share slot and markers by hand",
        late=[By.WEBHOOK],
    ),
    Attack(
        "T19",
        "placement annotations of a running pod changed, also by `pods/status`",
        [
            patches("steady", annotated(**{names.IDX: "1"}), By.ANNOTATIONS, names.IDX, "leave it unchanged"),
            patches(
                "idle",
                annotated(**{names.POLICY: "binpack"} | {f"{names.GROUP}/z{i}": "" for i in range(500)}),
                By.ANNOTATIONS,
                f"metadata.annotations[{names.GROUP}/z",
            ),
            patches(
                "steady", {"metadata": {"annotations": {names.ASSIGNMENT: None}}}, By.ANNOTATIONS, names.ASSIGNMENT
            ),
            patches("steady", {"metadata": {"annotations": None}}, By.ANNOTATIONS, "only Cardwise may change this"),
            patches("steady", annotated(**{names.IDX: "1"}), By.RBAC, "pods/status", sub="status"),
            patches("steady", annotated(**{names.IDX: "1"}), By.ANNOTATIONS, names.IDX, sub="status", as_debugger=True),
        ],
    ),
    Attack(
        "T20",
        "the same by `pods/resize` and `pods/ephemeralcontainers`",
        late=[By.KUBERNETES],
    ),
    Attack(
        "T21",
        "a share of a card in another container of his, by name or reference",
        late=[By.WEBHOOK],
    ),
    Attack(
        "T22",
        "another isolation or `sm-percent` for a pod that runs",
        [
            patches("steady", annotated(**{key: text}), By.ANNOTATIONS, f"metadata.annotations[{key}]")
            for key, text in ((names.ISOLATION, "none"), (names.SM_PERCENT, "memory"), (names.SM_PERCENT, "x" * 1000))
        ],
    ),
    Attack(
        "T55",
        "a share without MPS where his namespace forbids it",
        [
            creates(ours(annotations=annotations), By.WEBHOOK, "none is less than the advisory", guarded=True)
            for annotations in (
                {names.ISOLATION: "none"},
                {names.ISOLATION: "none", names.DEFAULTS_OPT_OUT: "disabled"},
            )
        ],
    ),
    Attack(
        "T23",
        "the mark of a static pod's mirror",
        [
            creates(
                with_spec(
                    plain(annotations={names.MIRROR: "x", "kubernetes.io/config.source": "file", **FORGED}),
                    nodeName="n1",
                ),
                By.ANNOTATIONS,
                "only Cardwise may write this annotation",
            ),
            creates(
                with_spec(ours(annotations={names.MIRROR: "x"}), nodeName="n1"),
                By.NODE_NAME,
                "spec.nodeName",
            ),
            # Once bound, such pods would count in no quota.
            creates(ours(annotations={names.MIRROR: "x"}), By.KUBERNETES, "must set spec.nodeName if mirror"),
            patches("gated", annotated(**{names.MIRROR: "x"}), By.KUBERNETES, "may not add mirror pod annotation"),
        ],
    ),
)

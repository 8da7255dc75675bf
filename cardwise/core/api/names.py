"""All names that leave the process: resources, annotations, labels, environment variables, paths.

They are in one module, because users, charts, policies and other programs depend on the spelling. A test compares the
chart and the docs with this module. gpushare's names are spelled exactly as in gpushare (gpushare-scheduler-extender
`pkg/utils/const.go`).
"""

import re
from typing import Final

from cardwise.core.api import mps, shareagent

GROUP: Final = "cardwise.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

# Resources.
GPU_MEM: Final = "aliyun.com/gpu-mem"  # MiB; node capacity is the sum of its cards
GPU_COUNT: Final = "aliyun.com/gpu-count"  # node capacity: cards; in a request alone: whole cards
GPU_CORE: Final = "aliyun.com/gpu-core.percentage"  # percent of one card's SMs
WHOLE_GPU: Final = "cardwise.dev/gpu"  # whole cards; the webhook writes all requests of whole cards with this name
SHARE: Final = "cardwise.dev/share"  # the resource of Cardwise's device plugin: one slot per container; not for users
# In a pod without a GPU request: kube-scheduler calls the extender's filter for the pod. Nodes with devices offer it.
FILTER_CALL_RESOURCE: Final = "cardwise.dev/place"
# In a pod without a GPU request and without a slot: kube-scheduler lets the extender bind the pod. No node offers it.
BIND_CALL_RESOURCE: Final = "cardwise.dev/bind"
NVIDIA_GPU: Final = "nvidia.com/gpu"  # the resource of NVIDIA's device plugin; Cardwise's only with the setting `take`
CLASS_PREFIX: Final = f"{GROUP}/"  # with the name of a ResourceClass: the resource of the class
# the resources of Cardwise's domain that are not classes
OWN_RESOURCES: Final = (WHOLE_GPU, SHARE, FILTER_CALL_RESOURCE, BIND_CALL_RESOURCE)
REQUESTED: Final = (GPU_MEM, GPU_COUNT, GPU_CORE, WHOLE_GPU)  # the resources that users may request

# The characters of a pod's UID. The API server writes UUIDs; the kubelet writes 32 hexadecimal digits for a static pod,
# whose manifest may set another UID.
POD_UID: Final = "^[0-9A-Za-z-]{1,128}$"

# Allocation by ResourceClaim (scheduler.mode=claims): core/api/claims.py.
DRIVER: Final = GROUP  # the DRA driver and its DeviceClass
# Scheduling gate of a pod without an allocated claim. The extender removes it; for a gang, once all members have one.
ALLOCATION_GATE: Final = "cardwise.dev/allocation"
POD_CLAIM: Final = "cardwise"  # the claim's name inside the pod: in spec.resourceClaims and in resources.claims
CLAIM_PREFIX: Final = "cardwise-"  # of the ResourceClaim's own name; 16 random hexadecimal digits follow

# Annotations of gpushare's protocol, which bind writes.
IDX: Final = "ALIYUN_COM_GPU_MEM_IDX"
POD_MEM: Final = "ALIYUN_COM_GPU_MEM_POD"
DEV_MEM: Final = "ALIYUN_COM_GPU_MEM_DEV"
ASSIGNED: Final = "ALIYUN_COM_GPU_MEM_ASSIGNED"
ASSUME_TIME: Final = "ALIYUN_COM_GPU_MEM_ASSUME_TIME"
CONTAINER_MEM: Final = "ALIYUN_COM_GPU_MEM_CONTAINER"  # environment only
GPUSHARE_PREFIX: Final = "ALIYUN_COM_GPU_MEM_"
GPUSHARE_ALLOCATION: Final = "scheduler.framework.gpushare.allocation"  # Alibaba's framework version: several cards

# Annotations of Cardwise that bind writes; users must not set them.
ASSIGNMENT: Final = "cardwise.dev/assignment"
# With the container key: the UUIDs of the container's cards, separated by commas; NO_CARDS with CDI.
DEVICES_OF: Final = "cardwise.dev/devices."
LIMIT_MIB_OF: Final = "cardwise.dev/mem-limit-mib."
FRACTION_OF: Final = "cardwise.dev/mem-fraction."
LIMIT_BYTES_OF: Final = "cardwise.dev/mem-limit-bytes."
# Written by the webhook.
# the number of cards of each split share, by container: core/api/request.py write_counts
GPU_COUNTS: Final = "cardwise.dev/gpu-counts"
# the classes of devices other than GPUs in the pod's limits, separated by commas
DEVICE_CLASSES: Final = "cardwise.dev/device-classes"

# Annotations that a user may set.
POLICY: Final = "cardwise.dev/policy"  # on a pod or a namespace: one of core/api/policies
ONE_NODE: Final = (
    "cardwise.dev/one-best-node"  # on a pod: "true" or "false" overrides what follows from its preferences
)
DEFAULTS_OPT_OUT: Final = "cardwise.dev/defaults"  # on a pod: "disabled"
DEFAULT_GPU_MEM: Final = "cardwise.dev/default-gpu-mem"  # on a namespace
CLASS: Final = "cardwise.dev/class"  # on a pod: the ResourceClass of its containers that name no class
QUEUE_PRIORITY: Final = "cardwise.dev/queue-priority"  # on a pod of a gang: an integer; a higher number goes first
ISOLATION: Final = "cardwise.dev/isolation"  # on a pod or a namespace: none, advisory, mps, kernel
SHARE_WITH: Final = "cardwise.dev/share-with"  # on a pod or a namespace: namespace
SM_PERCENT: Final = mps.SM_PERCENT  # on a pod or a namespace: core, memory
SHARE_AGENT: Final = shareagent.CHOICE_ANNOTATION  # on a pod: always, mps, never
FRAMEWORKS: Final = "cardwise.dev/frameworks"  # on a pod or a namespace: on, off, or frameworks separated by commas
NO_DEFRAG: Final = "cardwise.dev/no-defrag"  # on a pod: with "true", `cardwise defrag` does not move the pod
USER_ANNOTATIONS: Final = frozenset(
    {
        POLICY,
        ONE_NODE,
        DEFAULTS_OPT_OUT,
        CLASS,
        QUEUE_PRIORITY,
        ISOLATION,
        SHARE_WITH,
        SM_PERCENT,
        SHARE_AGENT,
        FRAMEWORKS,
        NO_DEFRAG,
    }
)
# On a Binding: the fencing token. It names the Lease and its leader epoch, and the API server compares both.
# On a pending pod: the fencing token and the time of the last fence; Bindings that were posted before the fence fail.
LEADER_EPOCH: Final = "cardwise.dev/leader-epoch"
# On a released Lease: its UID and the time of its release. Present only if no request that the former holder sent
# under it is still in flight.
FENCED: Final = "cardwise.dev/fenced"
# On workloads and ResourceQuotas, written by the webhook: the full resource names that replaced names without a domain.
REWRITTEN: Final = "cardwise.dev/rewritten"
# On ResourceQuotas and LimitRanges, written by the webhook if numbers without a unit mean GiB: the amounts that the
# webhook has converted to MiB, separated by commas.
WRITTEN_MIB: Final = "cardwise.dev/gpu-mem-mib"
_WRITTEN_ANNOTATIONS: Final = frozenset({ASSIGNMENT, GPU_COUNTS, DEVICE_CLASSES, LEADER_EPOCH})
_WRITTEN_PREFIXES: Final = (
    GPUSHARE_PREFIX, GPUSHARE_ALLOCATION, DEVICES_OF, LIMIT_MIB_OF, FRACTION_OF, LIMIT_BYTES_OF,
)  # fmt: skip
# On an automatic ResourceClass or PodGroup: a label with the value "true"; with another value, or none, the object
# belongs to a user. An automatic class also has an annotation with the spec that Cardwise wrote.
AUTO_LABEL: Final = "cardwise.dev/auto"
AUTO_SPEC: Final = "cardwise.dev/auto-spec"

# Labels.
DEFAULTS_LABEL: Final = "cardwise.dev/defaults"  # on a namespace: "enabled"
# on a namespace: the unit, MiB or GiB, of gpu-mem numbers without a unit
GPU_MEM_UNIT: Final = "cardwise.dev/gpu-mem-unit"
ACCELERATOR: Final = "accelerator"  # on a node whose cards are all of one model, such as nvidia-tesla-k80
NODE_LABEL: Final = "cardwise.dev/node"  # on an ExtendedResource
LEADER: Final = "cardwise.dev/leader"  # on the pod of the extender that is the leader: "true"

# Annotations or labels by which users write gangs. GANG is different: the webhook adds it to members, as a label and as
# a scheduling gate.
GROUP_NAME: Final = "scheduling.k8s.io/group-name"
GROUP_NUM: Final = "scheduling.k8s.io/group-pod-num"
COSCHEDULING: Final = "scheduling.x-k8s.io/pod-group"  # label: the name of a PodGroup of the coscheduling plugin
GANG: Final = "cardwise.dev/gang"

# Reason of an Event on a node: the ExtendedResource of one of its cards belongs to another node.
GPU_ON_ANOTHER_NODE: Final = "GPUOnAnotherNode"
# Reason of an Event on a node: MPS cannot run on a GPU, so pods share it without MPS.
MPS_UNAVAILABLE: Final = "MPSUnavailable"
# Reason of an Event on a pod: the pod was deleted, because a program other than the extender had bound it.
BOUND_WITHOUT_EXTENDER: Final = "BoundWithoutExtender"

# Annotation on a node. Changing it makes kube-scheduler retry the pods in its unschedulable queue.
REQUEUE: Final = "cardwise.dev/requeue"

# Environment of the container.
ENV_VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
NO_CARDS: Final = "void"  # the value of NVIDIA_VISIBLE_DEVICES with which NVIDIA's runtime adds no cards
ENV_DEVICE_ORDER: Final = "CUDA_DEVICE_ORDER"
ENV_LIMIT_MIB: Final = "CARDWISE_MEM_LIMIT_MIB"  # MiB on each of the container's cards
ENV_GPU_COUNT: Final = "CARDWISE_GPU_COUNT"  # the number of the container's cards, if its share is split over several
ENV_ISOLATION: Final = "CARDWISE_ISOLATION"  # the container's `isolation.MemoryTier` when it started
ENV_FRACTION: Final = "CARDWISE_MEM_FRACTION"  # the limit / the card's memory, rounded down to 4 decimal places
ENV_XLA_FRACTION: Final = "XLA_PYTHON_CLIENT_MEM_FRACTION"
ENV_XLA_FRACTION_NEW: Final = "XLA_CLIENT_MEM_FRACTION"
ENV_CUPY_LIMIT: Final = "CUPY_GPU_MEMORY_LIMIT"  # bytes
ENV_MPS_PREFIX: Final = "CUDA_MPS_"
# Variables of a container by which NVIDIA's container toolkit (1.20.1 and later) sets limits of the driver, in MiB.
ENV_GPU_MEMORY_PREFIX: Final = "NVIDIA_GPU_MEMORY_"
ENV_GPU_MEMORY_LIMIT: Final = "NVIDIA_GPU_MEMORY_LIMIT"
# the prefixes of the variables that set a container's limits
ENV_LIMIT_PREFIXES: Final = (ENV_MPS_PREFIX, ENV_GPU_MEMORY_PREFIX)
ENV_PCI_BUS_ID: Final = "PCI_BUS_ID"
# with the class: the variable with PCI addresses, named as by the SR-IOV device plugin
ENV_PCI_DEVICES_PREFIX: Final = "PCIDEVICE_CARDWISE_DEV_"
ENV_RDMA_DEVICES: Final = "CARDWISE_RDMA_DEVICES"  # names such as mlx5_0

# CDI (Container Device Interface): one device per share slot.
CDI_KIND: Final = SHARE

# The prefix of the extender's HTTP paths, the same as gpushare's.
EXTENDER_PREFIX: Final = "/gpushare-scheduler"

# Identities and objects of the chart.
NAMESPACE: Final = "cardwise-system"
WEBHOOK_CONFIGURATION: Final = "cardwise"
# The second mutating configuration: the API server calls webhooks in the order of these names, so the second one runs
# after those of other projects.
LATE_CONFIGURATION: Final = f"zz-{WEBHOOK_CONFIGURATION}"
SCHEDULER: Final = "cardwise-scheduler"  # the Deployment of scheduler.mode=own, and the default of scheduler.name
SCHEDULER_NAME: Final = "cardwise.dev/scheduler-name"  # annotation on this Deployment; the value of scheduler.name
# annotation of a kube-scheduler that scheduler.mode=kubeadm has changed
FORMER_CONFIG: Final = "cardwise-former-config"
PROBE_PRIORITY_CLASS: Final = "cardwise-probe"  # PriorityClass of pods that only test whether a card can be allocated
# Secrets in NAMESPACE with the CA and certificates of webhook and extender.
WEBHOOK_TLS: Final = "cardwise-webhook-tls"
EXTENDER_TLS: Final = "cardwise-extender-tls"
LEASE: Final = "cardwise-extender"  # the Lease in NAMESPACE that the leading extender holds
# ConfigMap in NAMESPACE: the requests from which the placement policies have learned, and settings of the extender
WORKLOAD: Final = "cardwise-workload"
WORKLOAD_REQUESTS: Final = "workload.json"  # key of this ConfigMap: the requests
WORKLOAD_POLICY: Final = "policy"  # key of this ConfigMap: the extender's --policy; for more settings see cardlimits.py

# Annotation of a pod for cluster-autoscaler: with "false" it does not evict the pod; with "true" it may evict the pod
# even if by default it would not.
SAFE_TO_EVICT: Final = "cluster-autoscaler.kubernetes.io/safe-to-evict"
# Annotation of Kubernetes: a string that says which limits a LimitRange set in the pod's containers.
LIMIT_RANGER: Final = "kubernetes.io/limit-ranger"
# Annotation of Kubernetes on the mirror pod of a static pod; no scheduler places mirror pods.
MIRROR: Final = "kubernetes.io/config.mirror"
FINISHED_PHASES: Final = ("Succeeded", "Failed")  # the phases in which a pod holds no resources


def is_placement_annotation(key: str) -> bool:
    """Whether only Cardwise may write this pod annotation. True also for every unknown key of Cardwise's domain."""
    if key.startswith((GPUSHARE_PREFIX, GPUSHARE_ALLOCATION)):
        return True
    return key.startswith("cardwise.dev/") and key not in USER_ANNOTATIONS


def is_written_by_cardwise(key: str) -> bool:
    """Whether Cardwise itself writes this pod annotation."""
    return key in _WRITTEN_ANNOTATIONS or key.startswith(_WRITTEN_PREFIXES)


def class_of(resource: str) -> str | None:
    """The ResourceClass of a resource name such as `cardwise.dev/nvidia.tesla.k80`; None for other names."""
    if resource.startswith(CLASS_PREFIX) and resource not in OWN_RESOURCES:
        return resource.removeprefix(CLASS_PREFIX)
    return None


def pci_devices_env(resource_class: str) -> str:
    """The variable with the PCI addresses of a container's devices of the class."""
    return ENV_PCI_DEVICES_PREFIX + re.sub(r"[^A-Za-z0-9]", "_", resource_class).upper()


def extended_resource_name(uuid: str) -> str:
    """Name of the ExtendedResource object of a card or device: its UUID as a DNS label."""
    return uuid.lower()

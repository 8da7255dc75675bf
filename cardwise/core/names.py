"""Every name that leaves the process: resources, annotations, labels, environment, paths.

One module, because users, charts, policies and other programs depend on the spelling; a test compares chart
and docs against it. gpushare's names are kept to the letter (gpushare-scheduler-extender `pkg/utils/const.go`).
"""

from typing import Final

GROUP: Final = "cardwise.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

# Resources.
GPU_MEM: Final = "aliyun.com/gpu-mem"  # MiB; node capacity is the sum of its cards
GPU_COUNT: Final = "aliyun.com/gpu-count"  # node capacity: cards; in a request alone: whole cards
GPU_CORE: Final = "aliyun.com/gpu-core.percentage"  # percent of one card's SMs
WHOLE_GPU: Final = "cardwise.dev/gpu"  # whole cards, as the webhook writes them
SHARE: Final = "cardwise.dev/share"  # the device plugin's own: one slot per container; users never write it
PLACE_MARKER: Final = "cardwise.dev/place"  # no node has it: brings a pod without GPU to filter
BIND_MARKER: Final = "cardwise.dev/bind"  # no node has it: brings a pod without GPU to bind
REQUESTED: Final = (GPU_MEM, GPU_COUNT, GPU_CORE, WHOLE_GPU)  # what a user may ask for

# Annotations of gpushare's protocol, written by bind.
IDX: Final = "ALIYUN_COM_GPU_MEM_IDX"
POD_MEM: Final = "ALIYUN_COM_GPU_MEM_POD"
DEV_MEM: Final = "ALIYUN_COM_GPU_MEM_DEV"
ASSIGNED: Final = "ALIYUN_COM_GPU_MEM_ASSIGNED"
ASSUME_TIME: Final = "ALIYUN_COM_GPU_MEM_ASSUME_TIME"
CONTAINER_MEM: Final = "ALIYUN_COM_GPU_MEM_CONTAINER"  # environment only
GPUSHARE_PREFIX: Final = "ALIYUN_COM_GPU_MEM_"
GPUSHARE_ALLOCATION: Final = "scheduler.framework.gpushare.allocation"  # Alibaba's framework version: several cards

# Annotations of ours, written by bind; users may not set them.
ASSIGNMENT: Final = "cardwise.dev/assignment"
DEVICES_OF: Final = "cardwise.dev/devices."  # + container key: card UUIDs by comma
LIMIT_MIB_OF: Final = "cardwise.dev/mem-limit-mib."
FRACTION_OF: Final = "cardwise.dev/mem-fraction."
LIMIT_BYTES_OF: Final = "cardwise.dev/mem-limit-bytes."
# Written by the webhook.
GPU_COUNT_OF: Final = "cardwise.dev/gpu-count."  # + container key: cards of a split share

# Annotations that a user may set.
POLICY: Final = "cardwise.dev/policy"  # on a pod or a namespace: binpack, spread
ONE_NODE: Final = "cardwise.dev/one-best-node"  # on a pod: "true" or "false" overrides the setting
DEFAULTS_OPT_OUT: Final = "cardwise.dev/defaults"  # on a pod: "disabled"
DEFAULT_GPU_MEM: Final = "cardwise.dev/default-gpu-mem"  # on a namespace
USER_ANNOTATIONS: Final = frozenset({POLICY, ONE_NODE, DEFAULTS_OPT_OUT})

# Labels.
DEFAULTS_LABEL: Final = "cardwise.dev/defaults"  # on a namespace: "enabled"
NODE_LABEL: Final = "cardwise.dev/node"  # on an ExtendedResource

# Annotation on a node: a change of it wakes pods that kube-scheduler has parked.
NODE_CHANGED: Final = "cardwise.dev/changed"

# Environment of the container.
ENV_VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
ENV_DEVICE_ORDER: Final = "CUDA_DEVICE_ORDER"
ENV_LIMIT_MIB: Final = "CARDWISE_MEM_LIMIT_MIB"  # MiB on each of the container's cards
ENV_FRACTION: Final = "CARDWISE_MEM_FRACTION"  # limit / card total, rounded down to 4 digits
ENV_XLA_FRACTION: Final = "XLA_PYTHON_CLIENT_MEM_FRACTION"
ENV_XLA_FRACTION_NEW: Final = "XLA_CLIENT_MEM_FRACTION"
ENV_CUPY_LIMIT: Final = "CUPY_GPU_MEMORY_LIMIT"  # bytes
ENV_MPS_PREFIX: Final = "CUDA_MPS_"
ENV_PCI_BUS_ID: Final = "PCI_BUS_ID"

# CDI (Container Device Interface): one device per share slot.
CDI_KIND: Final = SHARE

# The extender's HTTP paths, as gpushare's.
EXTENDER_PREFIX: Final = "/gpushare-scheduler"

# Identities and objects of the chart.
NAMESPACE: Final = "cardwise-system"
WEBHOOK_CONFIGURATION: Final = "cardwise"

# Kubernetes' own: the mark of a static pod's mirror, which nobody places; and the phases in which pods hold nothing.
MIRROR: Final = "kubernetes.io/config.mirror"
FINISHED_PHASES: Final = ("Succeeded", "Failed")


def is_placement_annotation(key: str) -> bool:
    """Whether only Cardwise may write this pod annotation."""
    if key.startswith((GPUSHARE_PREFIX, GPUSHARE_ALLOCATION)):
        return True
    return key.startswith("cardwise.dev/") and key not in USER_ANNOTATIONS


def extended_resource_name(uuid: str) -> str:
    """Name of the ExtendedResource object of a card: its UUID as a DNS label."""
    return uuid.lower()

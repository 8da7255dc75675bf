"""Node labels of other projects: which nodes have NVIDIA GPUs, and the state of a driver upgrade.

The chart uses these labels to select the nodes of its DaemonSets (`cardwise.pod.onNodes`). No I/O.
"""

from collections.abc import Mapping
from typing import Final

from cardwise.core.api import names
from cardwise.core.values import quantity

# The labels that mean that a node has an NVIDIA GPU, each with the values that mean it; () is any value. NVIDIA's GPU
# Operator and GPU feature discovery, node-feature-discovery, GKE, EKS and AKS write these labels.
GPU_NODE_LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    "nvidia.com/gpu.present": ("true",),
    "feature.node.kubernetes.io/pci-10de.present": ("true",),
    "feature.node.kubernetes.io/pci-0302_10de.present": ("true",),
    "feature.node.kubernetes.io/pci-0300_10de.present": ("true",),
    "cloud.google.com/gke-accelerator": (),
    "k8s.amazonaws.com/accelerator": (),
    "kubernetes.azure.com/accelerator": ("nvidia",),
}
GPU_PRESENT_LABEL: Final = (
    "nvidia.com/gpu.present"  # the label that administrators set if no component labels the nodes
)

# The resources of NVIDIA's device plugin. With time-slicing or MPS it can offer shares as nvidia.com/gpu.shared. Slices
# of MIG do not count: Cardwise leaves cards in MIG mode out.
_NVIDIA_RESOURCES: Final = (names.NVIDIA_GPU, f"{names.NVIDIA_GPU}.shared")

# While NVIDIA's GPU Operator replaces a node's driver, no program may use the kernel module. By label, the value that
# means that programs must stop using it: the driver manager's label (GPU Operator 26.7 and later), and the upgrade
# state (pkg/upgrade/consts.go of k8s-operator-libs) in which the node is drained and the driver's pod is restarted.
UPGRADE_LABELS: Final[Mapping[str, str]] = {
    "nvidia.com/gpu.deploy.client": "paused-for-driver-upgrade",
    "nvidia.com/gpu-driver-upgrade-state": "pod-restart-required",
}


def is_labelled(labels: Mapping[str, str]) -> bool:
    """Whether the node's labels mean that it has an NVIDIA GPU."""
    return any(key in labels and (not allowed or labels[key] in allowed) for key, allowed in GPU_NODE_LABELS.items())


def count_nvidia_gpus(capacity: Mapping[str, str]) -> int:
    """The number of GPUs, or shares of GPUs, that NVIDIA's device plugin offers on a node with this capacity."""
    return sum(quantity.parse_count(capacity.get(name, 0), minimum=0) for name in _NVIDIA_RESOURCES)


def nvidia_plugin_problem(nvidia_gpus: int) -> str | None:
    """Why Cardwise shares no card of the node: NVIDIA's device plugin offers this number of GPUs there; None for 0."""
    if not nvidia_gpus:
        return None
    return (
        f"NVIDIA's device plugin serves this node ({names.NVIDIA_GPU}: {nvidia_gpus}): stop it there, or set --gpus to "
        "the GPUs that Cardwise may share"
    )


def upgrade_label(labels: Mapping[str, str]) -> str | None:
    """The label, as KEY=VALUE, that the GPU Operator sets while it replaces the node's driver; None if absent."""
    return next((f"{key}={state}" for key, state in UPGRADE_LABELS.items() if labels.get(key) == state), None)

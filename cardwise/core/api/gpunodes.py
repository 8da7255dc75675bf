"""Node labels of other projects: which nodes have NVIDIA GPUs, and the state of a driver upgrade.

The chart uses these labels to select the nodes of its DaemonSets (`cardwise.pod.onNodes`). No I/O.
"""

from collections.abc import Mapping
from typing import Final

# The labels that mean that a node has an NVIDIA GPU, each with the values that mean it; () is any value. NVIDIA's GPU
# Operator and GPU feature discovery, node-feature-discovery, GKE, EKS and AKS write these labels.
LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    "nvidia.com/gpu.present": ("true",),
    "feature.node.kubernetes.io/pci-10de.present": ("true",),
    "feature.node.kubernetes.io/pci-0302_10de.present": ("true",),
    "feature.node.kubernetes.io/pci-0300_10de.present": ("true",),
    "cloud.google.com/gke-accelerator": (),
    "k8s.amazonaws.com/accelerator": (),
    "kubernetes.azure.com/accelerator": ("nvidia",),
}
PRESENT: Final = "nvidia.com/gpu.present"  # the label that administrators set if no component labels the nodes

# While NVIDIA's GPU Operator replaces a node's driver, no program may use the kernel module. By label, the value that
# means that programs must stop using it: the driver manager's label (GPU Operator 26.7 and later), and the upgrade
# state (pkg/upgrade/consts.go of k8s-operator-libs) in which the node is drained and the driver's pod is restarted.
UPGRADING: Final[Mapping[str, str]] = {
    "nvidia.com/gpu.deploy.client": "paused-for-driver-upgrade",
    "nvidia.com/gpu-driver-upgrade-state": "pod-restart-required",
}


def is_labelled(labels: Mapping[str, str]) -> bool:
    """Whether the node's labels mean that it has an NVIDIA GPU."""
    return any(key in labels and (not allowed or labels[key] in allowed) for key, allowed in LABELS.items())


def upgrade_label(labels: Mapping[str, str]) -> str:
    """The label, as KEY=VALUE, by which the GPU Operator shows that it replaces the node's driver; "" if absent."""
    return next((f"{key}={state}" for key, state in UPGRADING.items() if labels.get(key) == state), "")

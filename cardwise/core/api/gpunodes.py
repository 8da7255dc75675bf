"""Node labels of other projects: which nodes have NVIDIA GPUs, and the state of a driver upgrade.

The chart selects the nodes of its DaemonSets by them (`cardwise.pod.onNodes`). Pure.
"""

from collections.abc import Mapping
from typing import Final

# Labels of nodes with an NVIDIA GPU, with the values that say so; () means any value. NVIDIA's GPU Operator and GPU
# feature discovery, node-feature-discovery, GKE, EKS and AKS write them.
LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    "nvidia.com/gpu.present": ("true",),
    "feature.node.kubernetes.io/pci-10de.present": ("true",),
    "feature.node.kubernetes.io/pci-0302_10de.present": ("true",),
    "feature.node.kubernetes.io/pci-0300_10de.present": ("true",),
    "cloud.google.com/gke-accelerator": (),
    "k8s.amazonaws.com/accelerator": (),
    "kubernetes.azure.com/accelerator": ("nvidia",),
}
PRESENT: Final = "nvidia.com/gpu.present"  # for administrators of clusters in which no component labels the nodes

# While NVIDIA's GPU Operator replaces a node's driver no program may hold the kernel's module. By key, the value that
# tells its clients to leave: the driver manager's from 26.7 on, and the upgrade's state (pkg/upgrade/consts.go of
# k8s-operator-libs) in which the node has been drained and the driver's pod is restarted.
UPGRADING: Final[Mapping[str, str]] = {
    "nvidia.com/gpu.deploy.client": "paused-for-driver-upgrade",
    "nvidia.com/gpu-driver-upgrade-state": "pod-restart-required",
}


def is_labelled(labels: Mapping[str, str]) -> bool:
    """Whether the node has a label that means an NVIDIA GPU."""
    return any(key in labels and (not allowed or labels[key] in allowed) for key, allowed in LABELS.items())


def upgrade_label(labels: Mapping[str, str]) -> str:
    """The label, as KEY=VALUE, that means that the node's driver is being replaced; "" without it."""
    return next((f"{key}={state}" for key, state in UPGRADING.items() if labels.get(key) == state), "")

"""A real Kubernetes for tests and the demo: etcd, apiserver, scheduler, controllers, kubelets on containerd.

`python -m tests.cluster up` for people, `Cluster.start(ClusterSpec(...))` for tests.
"""

from tests.cluster.cluster import Cluster, ClusterSpec, PatientClient
from tests.cluster.processes import CommandFailed

__all__ = ["Cluster", "ClusterSpec", "CommandFailed", "PatientClient"]

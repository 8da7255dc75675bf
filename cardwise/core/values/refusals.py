"""Refusals: why a node does not take a pod, as a fixed set of constant texts.

kube-scheduler groups nodes with equal texts, and re-queues a pod when a text changes. So the texts must not contain
numbers or names; `explain` shows the details.
"""

from enum import Enum


class Refusal(Enum):
    """A reason why a node does not take a pod.

    text: the reason, for users.
    resolvable: whether evicting other pods may help.
    """

    NOT_OURS = ("The node has no GPU that Cardwise shares", False)
    NO_SUCH_TYPE = ("The node has no GPU of the requested type", False)
    TOO_FEW_CARDS = ("The node has fewer suitable GPUs than the pod requests", False)
    CARD_TOO_SMALL = ("The pod requests more GPU memory than any GPU of the node has", False)
    TOO_MANY_CONTAINERS = ("More of the pod's containers share one GPU than any GPU of the node allows", False)
    NO_MEMORY = ("Insufficient GPU Memory in one device", True)  # gpushare's text, which users search for
    NO_WHOLE_CARD = ("Insufficient unused GPUs", True)
    NO_CORE = ("Insufficient GPU cores in one device", True)
    TOO_MANY_CLIENTS = ("All GPUs with enough free memory have their maximum number of shares", True)
    TOGETHER = ("The node's GPUs fit each request of the pod, but not all of them together", True)
    NEVER_TOGETHER = ("The node's GPUs are too few or too small for all requests of the pod together", False)
    UNHEALTHY = ("All suitable GPUs are unhealthy", True)
    CORDONED = ("All suitable GPUs are cordoned", True)
    KERNEL_MISSING = (
        "The pod demands a memory limit by the driver, which the node's suitable GPUs do not give it",
        False,
    )
    MPS_MISSING = ("The pod demands a memory limit by MPS, which the node's suitable GPUs do not give it", False)
    MPS_SEVERAL = ("The pod requests several GPUs together, and MPS serves each GPU of the node separately", False)
    MPS_DOWN = ("MPS is not ready on the suitable GPUs", False)
    MPS_MIXED = ("The suitable GPUs are used by pods that differ in whether they use MPS", True)
    MPS_USER = ("MPS on the suitable GPUs serves one Unix user at a time, and pods of another user run there", True)
    WITHIN_NAMESPACE = ("The suitable GPUs are shared within another namespace only", True)
    OTHER_NAMESPACES = (
        "The pod shares GPUs within its namespace only, and pods of others run on the suitable GPUs",
        True,
    )
    NO_SLOTS = ("The node offers no GPU shares now: its device plugin is not running or is being replaced", False)
    NO_SUCH_DEVICE = ("The node does not have the requested devices", False)
    NO_DEVICE = ("Insufficient free devices of the requested class", True)
    UNSETTLED = ("The pod's last bind failed or may still succeed; the pod is tried again", False)
    # Not resolvable: only evicting pods of the same namespace could help, but kube-scheduler would evict any pods.
    QUOTA = ("The namespace's GPUQuota leaves no capacity on the suitable GPUs", False)
    # For gangs, only evictions that let the whole gang fit help, and the gang planner finds these.
    GANG_INCOMPLETE = ("The pod's gang has fewer pods than it needs to start", False)
    GANG_WAITS = ("The pod's gang does not fit as a whole", True)
    GANG_BACKS_OFF = ("The pod's gang could not be bound as a whole; it is tried again", False)
    GANG_FOLLOWS = ("The pod is bound once the minimum number of pods of its gang run", False)
    NOT_ITS_TURN = ("Pods of higher priority go first; the extender did not answer their last attempt", False)
    GANG_RESERVED = ("The suitable GPUs are reserved for a gang that has waited long", False)

    def __init__(self, text: str, resolvable: bool) -> None:
        self.text = text
        self.resolvable = resolvable

"""Refusals: why a node does not take a pod, as a fixed set of constant texts.

kube-scheduler groups nodes with equal texts, and re-queues a pod when a text changes. So the texts must not contain
numbers or names; `explain` shows the details.
"""

from enum import Enum


class Refusal(Enum):
    """A reason why a node does not take a pod.

    text: the reason, for users.
    resolvable: whether evicting other pods may help.
    remedy: what the user may do, for the reference page; in Markdown.
    """

    NOT_OURS = (
        "The node has no GPU that Cardwise shares",
        False,
        "`cardwise nodes`; the admin labels GPU nodes as `nodes.selector` says",
    )
    NO_SUCH_TYPE = ("The node has no GPU of the requested type", False, "`cardwise classes NAME`")
    TOO_FEW_CARDS = ("The node has fewer suitable GPUs than the pod requests", False, "never fits this node")
    CARD_TOO_SMALL = (
        "The pod requests more GPU memory than any GPU of the node has",
        False,
        "ask for less, or several GPUs with `aliyun.com/gpu-count`",
    )
    TOO_MANY_CONTAINERS = (
        "More of the pod's containers share one GPU than any GPU of the node allows",
        False,
        "move containers into separate pods; or the admin raises `extender.maxClients`",
    )
    # gpushare's text, which users search for
    NO_MEMORY = (
        "Insufficient GPU Memory in one device",
        True,
        "no single GPU has so much free, though all together may; wait, request less, or `cardwise defrag`",
    )
    NO_WHOLE_CARD = ("Insufficient unused GPUs", True, "it requests whole GPUs; wait")
    NO_CORE = ("Insufficient GPU cores in one device", True, "wait, or ask for less")
    TOO_MANY_CLIENTS = (
        "All GPUs with enough free memory have their maximum number of shares",
        True,
        "MPS serves 48 or 60 clients, or `extender.maxClients`; wait",
    )
    TOGETHER = (
        "The node's GPUs fit each request of the pod, but not all of them together",
        True,
        "wait, or move containers into separate pods",
    )
    NEVER_TOGETHER = (
        "The node's GPUs are too few or too small for all requests of the pod together",
        False,
        "never fits this node",
    )
    UNHEALTHY = ("All suitable GPUs are unhealthy", True, "`kubectl get er -o wide` says why")
    CORDONED = ("All suitable GPUs are cordoned", True, "wait, or `cardwise uncordon CARD`")
    KERNEL_MISSING = (
        "The pod demands a memory limit by the driver, which the node's suitable GPUs do not give it",
        False,
        "the driver is older than 615, or GPUs are given without CDI; or write `mps`",
    )
    MPS_MISSING = (
        "The pod demands a memory limit by MPS, which the node's suitable GPUs do not give it",
        False,
        "MPS does not run there, or cannot (`kubectl get er -o yaml`, `isolation`); or write `advisory`",
    )
    MPS_SEVERAL = (
        "The pod requests several GPUs together, and MPS serves each GPU of the node separately",
        False,
        "request one GPU in each container, or do not demand `mps`",
    )
    MPS_DOWN = (
        "MPS is not ready on the suitable GPUs",
        False,
        "wait; if it stays, `kubectl get er -o yaml` has the reason in `status.mps`",
    )
    MPS_MIXED = (
        "The suitable GPUs are used by pods that differ in whether they use MPS",
        True,
        "wait until those end, or change `cardwise.dev/isolation`",
    )
    MPS_USER = (
        "MPS on the suitable GPUs serves one Unix user at a time, and pods of another user run there",
        True,
        "drivers before 580: use one `runAsUser`, or `cardwise.dev/isolation: none`",
    )
    WITHIN_NAMESPACE = (
        "The suitable GPUs are shared within another namespace only",
        True,
        "wait until the pods of that namespace end",
    )
    OTHER_NAMESPACES = (
        "The pod shares GPUs within its namespace only, and pods of others run on the suitable GPUs",
        True,
        "wait for an empty GPU, or for one of the namespace",
    )
    NO_SLOTS = (
        "The node offers no GPU shares now: its device plugin is not running or is being replaced",
        False,
        "wait a minute; then `cardwise doctor`",
    )
    NO_SUCH_DEVICE = ("The node does not have the requested devices", False, "`cardwise classes NAME`")
    NO_DEVICE = ("Insufficient free devices of the requested class", True, "others hold them, or they are unhealthy")
    UNSETTLED = (
        "The pod's last bind failed or may still succeed; the pod is tried again",
        False,
        "nothing; its events say why",
    )
    # Not resolvable: only evicting pods of the same namespace could help, but kube-scheduler would evict any pods.
    QUOTA = (
        "The namespace's GPUQuota leaves no capacity on the suitable GPUs",
        False,
        "wait until pods of the namespace end, or ask for a larger quota",
    )
    # For gangs, only evictions that let the whole gang fit help, and the gang planner finds these.
    GANG_INCOMPLETE = (
        "The pod's gang has fewer pods than it needs to start",
        False,
        "`cardwise gangs`; create the missing ones",
    )
    GANG_WAITS = ("The pod's gang does not fit as a whole", True, "wait, request less, add nodes")
    GANG_BACKS_OFF = (
        "The pod's gang could not be bound as a whole; it is tried again",
        False,
        "if it stays, `cardwise gangs` says why",
    )
    GANG_FOLLOWS = ("The pod is bound once the minimum number of pods of its gang run", False, "nothing")
    NOT_ITS_TURN = (
        "Pods of higher priority go first; the extender did not answer their last attempt",
        False,
        "ends after 12 s",
    )
    GANG_RESERVED = (
        "The suitable GPUs are reserved for a gang that has waited long",
        False,
        "wait, 600 s at most; `cardwise gangs -A`",
    )

    def __init__(self, text: str, resolvable: bool, remedy: str) -> None:
        self.text = text
        self.resolvable = resolvable
        self.remedy = remedy

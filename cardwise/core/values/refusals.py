"""Refusals: why a node does not take a pod, as a closed set of constant texts.

kube-scheduler groups nodes by equal text and re-queues when a text changes, so no numbers and no names may appear
here; the detail is in `explain`.
"""

from enum import Enum


class Refusal(Enum):
    """A reason, and whether removing other pods could ever help (`resolvable`)."""

    NOT_OURS = ("The node has no GPU card that Cardwise shares", False)
    NO_SUCH_TYPE = ("The node has no GPU card of the type asked for", False)
    TOO_FEW_CARDS = ("The node has fewer GPU cards than the pod asks for", False)
    CARD_TOO_SMALL = ("The GPU memory asked for is more than any card of the node has", False)
    NO_MEMORY = ("Insufficient GPU Memory in one device", True)  # gpushare's text: users search for it
    NO_WHOLE_CARD = ("Insufficient empty GPU cards", True)
    NO_CORE = ("Insufficient GPU cores in one device", True)
    TOO_MANY_CLIENTS = ("Too many pods share each GPU card that has the memory", True)
    TOGETHER = ("The GPU cards have room for each request of the pod, not for all of them together", True)
    NEVER_TOGETHER = ("The GPU cards are too few or too small for all requests of the pod together", False)
    UNHEALTHY = ("Every GPU card that would do is unhealthy", True)
    CORDONED = ("Every GPU card that would do is cordoned", True)
    MPS_MISSING = ("The pod requires MPS, and the node has no MPS manager", False)
    MPS_SEVERAL = ("MPS serves each GPU card of the node by itself, and the pod asks for several together", False)
    MPS_DOWN = ("MPS is not ready on the GPU cards that would do", False)
    MPS_MIXED = ("The GPU cards that would do are shared by pods that differ in whether they use MPS", True)
    MPS_USER = ("MPS on the GPU cards that would do serves one user at a time, and not the pod's", True)
    NO_SLOTS = ("The node offers no GPU shares now: its device plugin is away or being exchanged", False)
    NO_SUCH_DEVICE = ("The node does not have the devices asked for", False)
    NO_DEVICE = ("Insufficient free devices of the class asked for", True)
    UNSETTLED = ("A bind of the pod failed a moment ago, or may still land; it is tried again", False)
    # Only pods of the same namespace could make room by going; kube-scheduler would preempt those of any.
    QUOTA = ("The namespace's GPUQuota leaves no room on the GPU cards that would do", False)
    # Only what completes the plan of a gang helps, and that is for its planner to find.
    GANG_INCOMPLETE = ("The pod's gang has fewer pods than it needs to start", False)
    GANG_WAITS = ("The pod's gang does not fit as a whole", True)
    GANG_BACKS_OFF = ("The pod's gang could not be bound as a whole a moment ago; it is tried again", False)
    GANG_FOLLOWS = ("The pod follows once the pods that its gang needs to start run", False)
    NOT_ITS_TURN = ("Pods of higher priority come first, for which no extender answered a moment ago", False)
    GANG_RESERVED = ("The GPU cards that would do are kept for a gang that has waited long", False)

    def __init__(self, text: str, resolvable: bool) -> None:
        self.text = text
        self.resolvable = resolvable

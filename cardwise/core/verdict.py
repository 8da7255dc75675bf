"""Why a node was refused: a closed set of constant texts.

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
    UNHEALTHY = ("Every GPU card that would do is unhealthy", True)
    # Only pods of the same namespace could make room by going; kube-scheduler would preempt those of any.
    QUOTA = ("The namespace's GPUQuota leaves no room on the GPU cards that would do", False)

    def __init__(self, text: str, resolvable: bool) -> None:
        self.text = text
        self.resolvable = resolvable

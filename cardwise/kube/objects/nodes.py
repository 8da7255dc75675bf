"""Nodes."""

from msgspec import Struct, field

from cardwise.kube.objects.meta import ObjectMeta


class NodeAddress(Struct):
    type: str = ""
    address: str = ""


class NodeStatus(Struct):
    """The status of a node. Quantities are text as sent; `cardwise.core.values.quantity` parses them."""

    capacity: dict[str, str] = {}
    allocatable: dict[str, str] = {}
    addresses: list[NodeAddress] | None = None


class Node(Struct):
    metadata: ObjectMeta
    status: NodeStatus = field(default_factory=NodeStatus)

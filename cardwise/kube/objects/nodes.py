"""Nodes."""

from typing import Final

import msgspec
from msgspec import Struct, field

from cardwise.kube.objects.meta import ObjectMeta


class Taint(Struct, frozen=True, gc=False):
    key: str = ""
    label_value: str = field(default="", name="value")
    effect: str = ""


class NodeSpec(Struct, frozen=True, gc=False):
    unschedulable: bool = False
    taints: tuple[Taint, ...] | None = None


class NodeAddress(Struct, frozen=True, gc=False):
    type: str = ""
    address: str = ""


class NodeStatus(Struct, frozen=True, gc=False):
    """The status of a node. Quantities are text as sent; `cardwise.core.values.quantity` parses them."""

    capacity: dict[str, str] = {}
    allocatable: dict[str, str] | None = None
    addresses: tuple[NodeAddress, ...] | None = None


class Node(Struct, frozen=True, gc=False):
    metadata: ObjectMeta
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


decode: Final = msgspec.json.Decoder(Node).decode

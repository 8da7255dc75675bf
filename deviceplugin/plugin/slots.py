"""The share slots: device IDs without a meaning. The kubelet calls the plugin at each start of a container with a slot.

The IDs are short and few, because the kubelet accepts lists up to 4 MiB: pkg/kubelet/cm/devicemanager keeps gRPC's
default of MaxCallRecvMsgSize.
"""

from collections.abc import Sequence
from typing import Final

from deviceplugin.api import deviceplugin_v1beta1_pb2 as wire

HEALTHY = "Healthy"  # deviceplugin/v1beta1/constants.go
# Maximum number of containers with a share that run on the node at a time: more than 16 GPUs with 30 pods each.
SLOT_COUNT: Final = 512


def make_slot_ids(count: int) -> tuple[str, ...]:
    """The IDs of `count` slots: `s001` and so on."""
    width = max(3, len(str(count)))
    return tuple(f"s{number:0{width}}" for number in range(1, count + 1))


SLOT_IDS: Final = make_slot_ids(SLOT_COUNT)


def build_device_list(slots: Sequence[str]) -> wire.ListAndWatchResponse:
    """The response of ListAndWatch. Slots are always healthy: the health of a card is in its ExtendedResource."""
    return wire.ListAndWatchResponse(devices=[wire.Device(ID=slot, health=HEALTHY) for slot in slots])

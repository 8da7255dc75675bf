"""The share slots: device IDs without a meaning. The kubelet calls the plugin for them at each start of a container.

The IDs are short and few, because the kubelet accepts no list above 4 MiB (its pkg/kubelet/cm/devicemanager sets no
MaxCallRecvMsgSize).
"""

from collections.abc import Sequence

from deviceplugin.api import deviceplugin_v1beta1_pb2 as wire

HEALTHY = "Healthy"  # deviceplugin/v1beta1/constants.go
MAX_LIST_BYTES = 3 * 1024 * 1024
DEFAULT_COUNT = 512


class TooManySlots(ValueError):
    """The list of slots is larger than the kubelet accepts."""


def make_slot_ids(count: int) -> tuple[str, ...]:
    """The IDs of `count` slots: `s001` and so on. Raises TooManySlots or ValueError."""
    if count < 1:
        raise ValueError(f"{count} slots: write at least 1: one for each container that may use a GPU at a time")
    width = max(3, len(str(count)))
    ids = tuple(f"s{number:0{width}}" for number in range(1, count + 1))
    # All entries are about as long as the last one, so a huge count is refused before its list is built.
    message_bytes = len(build_device_list(ids[-1:]).SerializeToString()) * count
    if message_bytes > MAX_LIST_BYTES:
        raise TooManySlots(
            f"{count} slots make a message of {message_bytes} bytes, the kubelet accepts {MAX_LIST_BYTES}: "
            f"write at most {MAX_LIST_BYTES * count // message_bytes}"
        )
    return ids


def build_device_list(slots: Sequence[str]) -> wire.ListAndWatchResponse:
    """The response of ListAndWatch. Slots are always healthy: the health of a card is in its ExtendedResource."""
    return wire.ListAndWatchResponse(devices=[wire.Device(ID=slot, health=HEALTHY) for slot in slots])

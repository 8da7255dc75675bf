"""The cards and devices of this node at one moment, by UUID, for comparison with grants."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from cardwise.devices.protocol import Devices, OtherDevice
from cardwise.gpus.protocol import GpuCard, Gpus


@dataclass(frozen=True, slots=True)
class Hardware:
    """The cards, and the other devices, of this node at one moment, by UUID."""

    cards: Mapping[str, GpuCard]
    devices: Mapping[str, OtherDevice]

    @classmethod
    def read(cls, gpus: Gpus, devices: Devices) -> Self:
        return cls({card.uuid: card for card in gpus.cards()}, {device.uuid: device for device in devices.devices()})

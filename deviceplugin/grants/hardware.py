"""What this machine has at one moment, by UUID: what grants are held against, and what specs are made from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from cardwise.devices.protocol import Devices, OtherDevice
from cardwise.gpus.protocol import GpuCard, Gpus


@dataclass(frozen=True, slots=True)
class Hardware:
    """Its cards, and its devices that are no GPUs."""

    cards: Mapping[str, GpuCard]
    devices: Mapping[str, OtherDevice]

    @classmethod
    def look(cls, gpus: Gpus, devices: Devices) -> Self:
        return cls({card.uuid: card for card in gpus.cards()}, {device.uuid: device for device in devices.devices()})

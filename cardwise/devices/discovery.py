"""The devices that a node offers: what sysfs has, held against the entries of the file. Pure over a root folder."""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from cardwise.devices.protocol import RDMA, DeviceNode, OtherDevice
from cardwise.devices.settings import DeviceRule
from cardwise.devices.sysfs import VFIO, PciDevice, RdmaDevice, Tree, natural

_RDMA_CM, _VFIO_ALL = "rdma_cm", "vfio"  # names of misc devices, whose nodes are common to all of a kind


def discover(offers: Sequence[DeviceRule], sysfs: Path, dev: Path, node: str) -> list[OtherDevice]:
    """All devices of `node` that an offer matches, those of a kind in the order of their names or addresses.

    What has one PCI address is one piece of hardware, and is offered once: an RDMA device is not also the network card
    that it is on.
    """
    tree = Tree(sysfs)
    taken: set[str] = set()
    found: dict[str, list[OtherDevice]] = defaultdict(list)
    for offer in offers:
        fresh = list(_of(offer, tree, dev, node, taken))
        taken |= {device.pci_address or device.name for device in fresh}
        found[offer.kind] += fresh
    ordered = [
        dataclasses.replace(device, index=index)
        for kind in sorted(found)
        for index, device in enumerate(sorted(found[kind], key=_order))
    ]
    return _exclusive(ordered)


def _of(offer: DeviceRule, tree: Tree, dev: Path, node: str, taken: set[str]) -> Iterator[OtherDevice]:
    if offer.kind == RDMA:
        here = tree.rdma_devices()
        guids = Counter(device.guid for device in here)
        common = _nodes([f"infiniband/{_RDMA_CM}"] if tree.has_misc(_RDMA_CM) else [], dev)
        for rdma in here:
            pci = tree.pci_device(rdma.address) if rdma.address else None
            suits = offer.any_pci if pci is None else offer.matches(pci.facts)
            if suits and (rdma.address or rdma.name) not in taken:
                named = rdma.guid if guids[rdma.guid] == 1 else ""
                yield _rdma(rdma, pci, named or f"{node}-{rdma.name}", _nodes(rdma.nodes, dev), common)
        return
    nodes: Mapping[str, list[str]] | None = None
    for address in tree.pci_addresses():
        if address not in taken:
            pci = tree.pci_device(address)
            if offer.matches(pci.facts):
                nodes = tree.character_nodes() if nodes is None else nodes
                yield _pci(offer.kind, pci, node, nodes.get(address, ()), dev)


def _rdma(
    rdma: RdmaDevice, pci: PciDevice | None, named: str, nodes: tuple[DeviceNode, ...], common: tuple[DeviceNode, ...]
) -> OtherDevice:
    port = rdma.port
    properties = _pci_properties(pci) if pci is not None else {}
    properties |= {"name": rdma.name, "firmware": rdma.firmware, "board": rdma.board, "netdev": rdma.netdev}
    if port is not None:
        properties |= {"linkLayer": port.link_layer, "rate": port.rate}
    return OtherDevice(
        kind=RDMA,
        index=0,
        uuid=_object_name(f"rdma-{named}"),
        model=rdma.model or (_vendor_device(pci) if pci is not None else rdma.name),
        nodes=nodes,
        common=common,
        pci_address=rdma.address,
        name=rdma.name,
        properties=_known(properties),
        trouble=rdma.trouble or ("" if nodes else f"{rdma.name} has no uverbs node; load the module ib_uverbs"),
    )


def _pci(kind: str, pci: PciDevice, node: str, below: Iterable[str], dev: Path) -> OtherDevice:
    by_vfio = pci.driver == VFIO and bool(pci.group)
    return OtherDevice(
        kind=kind,
        index=0,
        uuid=_object_name(f"pci-{node}-{pci.address}"),
        model=_vendor_device(pci),
        nodes=_nodes([*below, *([f"vfio/{pci.group}"] if by_vfio else [])], dev),
        common=_nodes([f"vfio/{_VFIO_ALL}"] if by_vfio else [], dev),
        pci_address=pci.address,
        properties=_known(_pci_properties(pci)),
    )


def _exclusive(devices: Sequence[OtherDevice]) -> list[OtherDevice]:
    """A device with a node that an earlier one has as well is sick: who has one would reach the other.

    So it is with two devices of one IOMMU group.
    """
    owners: dict[DeviceNode, OtherDevice] = {}
    uuids: set[str] = set()
    result = []
    for device in devices:
        if device.uuid in uuids:
            continue  # two names that are one when written as an object's: nobody could tell them apart
        uuids.add(device.uuid)
        shared = next((one for one in device.nodes if one in owners), None)
        if shared is not None:
            other = owners[shared]
            why = (
                f"{shared.host} is the node of {other.kind} {other.index} ({other.pci_address or other.name}) as well, "
                "so a container with one of them would reach the other; this one is not given"
            )
            result.append(dataclasses.replace(device, trouble=device.trouble or why))
            continue
        owners |= dict.fromkeys(device.nodes, device)
        result.append(device)
    return result


def _pci_properties(pci: PciDevice) -> dict[str, str]:
    return {
        "pciAddress": pci.address,
        "vendor": pci.facts.vendor,
        "device": pci.facts.device,
        "class": pci.facts.code,
        "driver": pci.driver,
        "numaNode": pci.numa,
    }


def _known(properties: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in properties.items() if value}


def _vendor_device(pci: PciDevice) -> str:
    return f"{pci.facts.vendor}:{pci.facts.device}"


def _nodes(paths: Iterable[str], dev: Path) -> tuple[DeviceNode, ...]:
    return tuple(DeviceNode(host=str(dev / path), container=f"/dev/{path}") for path in paths)


def _object_name(text: str) -> str:
    """As the name of an object may be written: neither `:` nor the `_` of mlx5_0."""
    return re.sub(r"[^a-z0-9.-]", "-", text.lower())


def _order(device: OtherDevice) -> tuple[list[tuple[int, str]], str]:
    return natural(device.name), device.pci_address

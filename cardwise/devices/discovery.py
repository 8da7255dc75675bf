"""Discover the devices that a node offers: the devices in sysfs that match a rule. Pure, below a root folder."""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from cardwise.devices.protocol import RDMA_KIND, DeviceNode, OtherDevice
from cardwise.devices.settings import DeviceRule
from cardwise.devices.sysfs import VFIO_DRIVER, PciDevice, RdmaDevice, Sysfs, natural_sort_key

_RDMA_CM, _VFIO_ALL = "rdma_cm", "vfio"  # misc devices: all devices of a kind share their device nodes


def discover(rules: Sequence[DeviceRule], sysfs: Path, dev: Path, node_name: str) -> list[OtherDevice]:
    """All devices of the Kubernetes node that match a rule, ordered by kind, then by name or address.

    Hardware with the same PCI address is offered once, by the first rule that matches. For example, an RDMA device and
    its network card are not both offered.
    """
    sysfs_tree = Sysfs(sysfs)
    matched_names: set[str] = set()
    devices_by_kind: dict[str, list[OtherDevice]] = defaultdict(list)
    for rule in rules:
        matched = list(_matching_devices(rule, sysfs_tree, dev, node_name, matched_names))
        matched_names |= {device.pci_address or device.name for device in matched}
        devices_by_kind[rule.kind] += matched
    ordered = [
        dataclasses.replace(device, index=index)
        for kind in sorted(devices_by_kind)
        for index, device in enumerate(sorted(devices_by_kind[kind], key=_sort_key))
    ]
    return _mark_shared_nodes(ordered)


def _matching_devices(
    rule: DeviceRule, sysfs_tree: Sysfs, dev: Path, node_name: str, matched_names: set[str]
) -> Iterator[OtherDevice]:
    if rule.kind == RDMA_KIND:
        rdma_devices = sysfs_tree.rdma_devices()
        guids = Counter(device.guid for device in rdma_devices)
        common = _device_nodes([f"infiniband/{_RDMA_CM}"] if sysfs_tree.has_misc(_RDMA_CM) else [], dev)
        for rdma in rdma_devices:
            pci = sysfs_tree.pci_device(rdma.address) if rdma.address else None
            is_match = rule.matches_any_pci if pci is None else rule.matches(pci.facts)
            if is_match and (rdma.address or rdma.name) not in matched_names:
                name = rdma.guid if guids[rdma.guid] == 1 else ""
                yield _rdma_device(
                    rdma, pci, name or f"{node_name}-{rdma.name}", _device_nodes(rdma.nodes, dev), common
                )
        return
    nodes: Mapping[str, list[str]] | None = None
    for address in sysfs_tree.pci_addresses():
        if address not in matched_names:
            pci = sysfs_tree.pci_device(address)
            if rule.matches(pci.facts):
                nodes = sysfs_tree.character_nodes() if nodes is None else nodes
                yield _other_pci_device(rule.kind, pci, node_name, nodes.get(address, ()), dev)


def _rdma_device(
    rdma: RdmaDevice, pci: PciDevice | None, name: str, nodes: tuple[DeviceNode, ...], common: tuple[DeviceNode, ...]
) -> OtherDevice:
    port = rdma.port
    properties = _pci_properties(pci) if pci is not None else {}
    properties |= {"name": rdma.name, "firmware": rdma.firmware, "board": rdma.board, "netdev": rdma.netdev}
    if port is not None:
        properties |= {"linkLayer": port.link_layer, "rate": port.rate}
    return OtherDevice(
        kind=RDMA_KIND,
        index=0,
        uuid=_object_name(f"rdma-{name}"),
        model=rdma.model or (_vendor_device(pci) if pci is not None else rdma.name),
        nodes=nodes,
        common=common,
        pci_address=rdma.address,
        name=rdma.name,
        properties=_drop_empty_properties(properties),
        problem=rdma.problem or (None if nodes else f"{rdma.name} has no uverbs node; load the module ib_uverbs"),
    )


def _other_pci_device(kind: str, pci: PciDevice, node_name: str, device_files: Iterable[str], dev: Path) -> OtherDevice:
    is_vfio = pci.driver == VFIO_DRIVER and pci.iommu_group is not None
    return OtherDevice(
        kind=kind,
        index=0,
        uuid=_object_name(f"pci-{node_name}-{pci.address}"),
        model=_vendor_device(pci),
        nodes=_device_nodes([*device_files, *([f"vfio/{pci.iommu_group}"] if is_vfio else [])], dev),
        common=_device_nodes([f"vfio/{_VFIO_ALL}"] if is_vfio else [], dev),
        pci_address=pci.address,
        properties=_drop_empty_properties(_pci_properties(pci)),
    )


def _mark_shared_nodes(devices: Sequence[OtherDevice]) -> list[OtherDevice]:
    """Mark each device unhealthy that shares a device node with an earlier device.

    Its container could use the earlier device too. Two devices of the same IOMMU group share a node.
    """
    owners: dict[DeviceNode, OtherDevice] = {}
    uuids: set[str] = set()
    devices_with_problems = []
    for device in devices:
        if device.uuid in uuids:
            continue  # an earlier device has the same object name, so the two cannot be distinguished
        uuids.add(device.uuid)
        shared = next((node for node in device.nodes if node in owners), None)
        if shared is not None:
            other = owners[shared]
            problem = (
                f"{shared.host} is the node of {other.kind} {other.index} ({other.pci_address or other.name}) as well, "
                "so a container with one of them would reach the other; this one is not offered"
            )
            devices_with_problems.append(dataclasses.replace(device, problem=device.problem or problem))
            continue
        owners |= dict.fromkeys(device.nodes, device)
        devices_with_problems.append(device)
    return devices_with_problems


def _pci_properties(pci: PciDevice) -> dict[str, str]:
    return {
        "pciAddress": pci.address,
        "vendor": pci.facts.vendor,
        "device": pci.facts.device,
        "class": pci.facts.class_code,
        "driver": pci.driver,
        "numaNode": pci.numa_node,
    }


def _drop_empty_properties(properties: Mapping[str, str]) -> dict[str, str]:
    return {key: text for key, text in properties.items() if text}


def _vendor_device(pci: PciDevice) -> str:
    return f"{pci.facts.vendor}:{pci.facts.device}"


def _device_nodes(paths: Iterable[str], dev: Path) -> tuple[DeviceNode, ...]:
    return tuple(DeviceNode(host=str(dev / path), container=f"/dev/{path}") for path in paths)


def _object_name(text: str) -> str:
    """`text` as a valid object name: without `:` and without `_`, as in mlx5_0."""
    return re.sub(r"[^a-z0-9.-]", "-", text.lower())


def _sort_key(device: OtherDevice) -> tuple[list[tuple[int, str]], str]:
    return natural_sort_key(device.name), device.pci_address

"""Devices other than GPUs: the devices that a node offers, and their health as sysfs reports it.

Input: an administrator's file (`--devices`), and sysfs. Output: the offered devices, and the problem of each
unhealthy one.

The modules:

    protocol   `Devices`: the offered devices and their health
    settings   parses the file of `--devices` into rules
    discovery  the devices in sysfs that match a rule
    offered    `Devices` of a node, kept up to date by polling
    sysfs      reads PCI and RDMA devices from sysfs

Public seam: `Devices`. The device plugin knows the devices only by this interface. Example, a node with one network
card that never changes:

    >>> from cardwise.devices.protocol import RDMA_KIND, NoDevices, OtherDevice
    >>> class OneNetworkCard(NoDevices):
    ...     def devices(self):
    ...         return [OtherDevice(kind=RDMA_KIND, index=0, uuid="nic-0", model="ConnectX-7", nodes=())]
    >>> [(device.kind, device.uuid) for device in OneNetworkCard().devices()]
    [('rdma', 'nic-0')]
"""

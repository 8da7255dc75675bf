"""Devices other than GPUs: the devices that a node offers, and their health as sysfs reports it.

Input: an administrator's file (`--devices`), and sysfs. Output: the offered devices, and the problem of each
unhealthy one.

The modules:

    protocol   `Devices`: the offered devices and their health
    settings   parses the file of `--devices` into rules
    discovery  the devices in sysfs that match a rule
    offered    `Devices` of a node, kept up to date by polling
    sysfs      reads PCI and RDMA devices from sysfs
"""

"""Devices that are not GPUs: which of them a node offers, and what sysfs says of them.

The modules:

    protocol   what devices there are
    settings   the file of `--devices`
    discovery  which devices of sysfs the file offers
    offered    the devices that are offered, up to date while devices come and go
    sysfs      the reader of sysfs
"""

"""Devices that are not GPUs: which of them a node offers, and what sysfs says of them.

Comes in: an admin's file, and sysfs. Goes out: the devices that are offered, and what is wrong with the
sick ones.

The modules:

    protocol   what devices there are
    settings   the file of `--devices`
    discovery  which devices of sysfs the file offers
    offered    the devices that are offered, up to date while devices come and go
    sysfs      the reader of sysfs
"""

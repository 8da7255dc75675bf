"""Devices that are not GPUs: which of them a node offers, and what sysfs says of them."""

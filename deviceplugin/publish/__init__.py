"""Writes what the cluster knows of this node: capacities, labels, an ExtendedResource for each card, marks on pods.

Comes in: the hardware, grants and pods. Goes out: writes to the API server, and metrics.

Read first: `cards` (what is told, pure), then `inventory` (when it is written).
"""

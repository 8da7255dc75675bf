"""Publishes this node to the cluster: node capacities and label, an ExtendedResource per card, marks on pods, metrics.

Input: the hardware, grants and pods. Output: writes to the API server, and metrics.

Read first: `cards` (which objects should exist, pure), then `inventory` (writes them).

Node: `node` (capacities, label), `handover` (from gpushare's device plugin), `shutdown`. Cards: `cardloads` (their
load), `cordons`, `stalemps` (MPS statuses that no manager updates). Pods: `marking`. `writes` holds back repeated
writes; `metrics` are those of the device plugin.
"""

"""Publishes this node to the cluster: node capacities and label, an ExtendedResource per card, marks on pods, metrics.

Input: the hardware, grants and pods. Output: writes to the API server, and metrics.

Read first: `cards` (the desired objects, pure), then `inventory` (writes them).

Node: `node` (capacities, label), `handover` (from gpushare's device plugin), `shutdown`. Cards: `cardloads`, `cordons`,
`stalemps` (MPS statuses that no manager updates any more). Pods: `marking`. `writes` holds back repeated writes;
`metrics` has the metrics of the device plugin.
"""

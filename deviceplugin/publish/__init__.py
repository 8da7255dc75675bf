"""Writes what the cluster knows of this node: capacities, labels, an ExtendedResource for each card, marks on pods.

Comes in: the hardware, grants and pods. Goes out: writes to the API server, and metrics.

Read first: `cards` (what is told, pure), then `inventory` (when it is written).

Of the node: `node` (capacities, label), `handover` (gpushare's plugin was here before), `shutdown`. Of cards:
`cardlevels` (their load), `cordons`, `stalemps` (MPS statuses nobody keeps). Of pods: `marking`. `writes` holds back
what repeats a write; `metrics` are ours.
"""

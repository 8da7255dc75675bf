"""Readers of this machine: processes, cgroups, the driver, the front end of MPS, and the pods of the node.

Comes in: /proc, cgroups, `nvidia-cuda-mps-control`, the API server. Goes out: records. Nothing here decides.

Read first: `processes`, then `control`.
"""

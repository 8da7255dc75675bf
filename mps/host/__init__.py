"""Readers of this machine: processes, cgroups, the driver, the front end of MPS, and the pods of the node.

Input: /proc, cgroups, `nvidia-cuda-mps-control`, the API server. Output: records. These modules read and send commands;
their callers make all decisions.

    processes  control daemons, servers, and programs on the cards
    cgroups    the pod and container of a process
    control    commands to `nvidia-cuda-mps-control`
    drivers    the differences between NVIDIA's drivers
    pods       the pods of this node with their shares
"""

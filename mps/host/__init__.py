"""Readers of this node: its processes, cgroups, driver and pods, and the front end of MPS.

Input: /proc, cgroups, `nvidia-cuda-mps-control`, the API server. Output: records. These modules only read, and send
commands to MPS daemons. Their callers make all decisions.

    availability   whether MPS can run on a card
    processes      control daemons, servers, and programs on the cards
    cgroups        the pod and container of a process
    control        commands to `nvidia-cuda-mps-control`
    drivers        the differences between NVIDIA's drivers
    pods           the pods of this node with their shares
    ownnode        what NVIDIA's device plugin offers on this node
    processowners  the pod of a process
"""

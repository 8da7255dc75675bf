"""Measures what each container uses of each GPU of the node, with and without MPS (docs/design/0039-use.md).

Input: the processes on the GPUs, cgroups, pods of the node. Output: metrics, and the history of the last hours.

    sampler        the loop that takes a sample each second
    containeruse   from samples of processes to the use of containers (pure)
    history        the peak of each minute, for some hours
    usemetrics     metrics of the present use
"""

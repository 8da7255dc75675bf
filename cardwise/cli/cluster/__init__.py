"""Reads the cluster for the commands, beyond `cardwise.kube.clusterstate`, and writes moves and cordons.

Input: a client. Output: nodes and pods to simulate, pods that may be moved, users of GPUs, cordons.

    liveworkload  the cluster as a workload to simulate
    nodestates    why a whole node takes no new pods
    engine        where the extender would place a pod
    whatif        pods and nodes that do not exist yet
    published     the extender's policy and workload, from its ConfigMap
    schedulers    whether the chart's own kube-scheduler runs
    usage         cards and their holders, for `top`
    usagehistory  what containers have used in the last hours, for `advise` and `idle`
    recordeduse   the same of the last days, from Prometheus
    recordedtotals  sums over days, from Prometheus, for `report`
    prometheus    queries to Prometheus
    idlepods      pods that hold a share and do not compute
    frameworks    which frameworks preallocate, and how they are recognised
    visible       the view of a user without the right to read cards
    podgroups     gangs: phase, members, reserved cards
    movables      pods that `defrag` may move
    evicting      evicts the pods that `defrag` moves
    cordons       finds a card, and cordons it
    workloads     a workload by its name, with its pods
    podevents     events about workloads and pods
    installation  whether the webhook is called for a namespace, and whether an extender leads
"""

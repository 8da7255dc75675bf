"""What commands read of the cluster beyond `cardwise.kube.survey`, in core's terms; the moves they make there.

Comes in: a client. Goes out: nodes and pods to simulate, pods that may be moved, who uses what, cordons.

    snapshots  the cluster as something to simulate
    engine     where the extender would place a pod
    whatif     pods and nodes that are not there yet
    published  the extender's policy and workload, by its ConfigMap
    usage      cards and who uses them, for `top`; `visible`: what a user sees who may read no card
    movables   pods that `defrag` may move; `evicting`: moves them
    cordons    finds a card, and cordons it
    workloads  a workload by its name, with its pods
    listing    lists whole objects
"""

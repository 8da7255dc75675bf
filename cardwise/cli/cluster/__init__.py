"""Reads of the cluster for the commands, beyond `cardwise.kube.survey`, and the moves and cordons that they make there.

Comes in: a client. Goes out: nodes and pods to simulate, pods that may be moved, who uses what, cordons.

    snapshots  the cluster as something to simulate; `nodestates`: why a whole node takes no new pods
    engine     where the extender would place a pod
    whatif     pods and nodes that are not there yet
    published  the extender's policy and workload, by its ConfigMap; `schedulers`: whether the chart's own is there
    usage      cards and who uses them, for `top`; `visible`: the view of a user who may read no card
    podgroups  gangs, how far each is and what is held for it
    movables   pods that `defrag` may move; `evicting`: moves them
    cordons    finds a card, and cordons it
    workloads  a workload by its name, with its pods; `podevents`: what events say of both
    installation  whether the webhook is asked about a namespace, and whether an extender leads
"""

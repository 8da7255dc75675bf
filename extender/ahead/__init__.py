"""Decisions ahead of kube-scheduler: cards for waiting pods, and nodes that are kept for a gang that waits long.

Comes in: who is next in the queue, and which gangs have waited long. Goes out: the node that a pod gets ahead, and the
nodes that are kept for a gang.

    ahead    gives waiting pods a node and cards ahead of kube-scheduler
    reserve  keeps nodes for a gang that has waited long
"""

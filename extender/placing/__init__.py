"""Placing: chooses a node and cards for a single pod.

Input: a pod's request and the nodes that kube-scheduler offers. Output: a node with cards, the scores of all nodes, or
the refusal of each node.

The caller holds the lock of `extender.state`, except for `nodesearch` and methods of `scoredpolicies` that take it.

    placing         asks the placement engine for one pod, under the lock. Read this first
    nodesearch      searches nodes for pods with several card requests, on a snapshot and without the lock
    scoredpolicies  the engine of the scored policies, made when it is first needed
    nodefacts       what a placement policy sees of the nodes when it ranks them for a pod
"""

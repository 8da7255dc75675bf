"""Placing: chooses a node and cards for a single pod.

Input: a pod's request and the nodes that kube-scheduler offers. Output: a node with cards, the scores of all nodes, or
the refusal of each node.

The caller holds the lock of `extender.state`, except where `nodesearch` and `scoredpolicies` acquire it themselves.

    placing         asks the placement engine for one pod, under the lock. Read this first
    nodesearch      searches nodes for pods with several card requests, on a snapshot and without the lock
    scoredpolicies  the engine of the scored policies, created when a pod first needs it
    nodefacts       the facts about nodes from which a placement policy ranks the nodes for a pod
"""

"""Pods as kube-scheduler and the disruption controller see them.

Input: decoded pods, nodes and budgets. Output: loads, names of nodes, evictions.

The modules:

    loads     the cpu, memory and pod slots that pods use and nodes have; `resizes`: for pods that are resized in place
    eligible  the nodes on which kube-scheduler might put a pod; `nodeconstraints`: node selector, node affinity and
              tolerations, parsed once
    budgets   PodDisruptionBudgets
    eviction  evicts a pod, if its disruption budgets allow it
"""

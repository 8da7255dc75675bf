"""Pods as kube-scheduler and the disruption controller see them.

Input: decoded pods, nodes and budgets. Output: loads, names of nodes, evictions.

The modules:

    loads     cpu, memory and pods that pods take and nodes have; `resizes`: of pods that are resized in place
    eligible  the nodes on which kube-scheduler might put a pod; `nodeconstraints`: node selector, node affinity and
              tolerations, read once
    budgets   PodDisruptionBudgets
    eviction  evicts a pod, as budgets allow
"""

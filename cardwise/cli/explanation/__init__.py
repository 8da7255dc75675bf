"""The text of `cardwise explain`: sentences about the findings of `core.preemption.explanation`.

Input: a pod, the state of the cluster, the engine. Output: lines for people, objects for programs.

    sentences    why a pod is pending, or why it runs on its node and card (read this module first)
    blockers     causes that block a pod before any card is checked: scheduler, gates, gang, nodes, classes, quotas
    gangfit      whether the pod's gang could ever start
    remedies     changes that would let the pod run
    policylines  which placement policy decides for the pod
    missingpods  why a workload has no pod, and what happened to a deleted pod
    objects      the explanation as JSON
"""

"""The text of `cardwise explain`: sentences about the findings of `core.preemption.explanation`.

Input: a pod, a survey, the engine. Output: lines for people, objects for programs.

    sentences  why a pod is pending, or why it runs where it runs. Read this first
    blockers    what blocks the pod before any card is checked: scheduler, gates, gang, nodes, classes, quotas
    gangfit    whether its gang could ever start
    remedies   what would let it run
    missingpods   why a workload has no pod, and what happened to a deleted pod
    objects    the same as JSON
"""

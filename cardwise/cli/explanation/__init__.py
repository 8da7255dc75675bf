"""What `cardwise explain` says: sentences over what `core.preemption.explanation` finds.

Comes in: a pod, a survey, the engine. Goes out: lines for people, objects for programs.

    sentences  why a pod waits, or why it is where it is. Read this first
    holdups    what keeps it waiting before any card is looked at: scheduler, gates, gang, nodes, classes, quotas
    gangfit    whether its gang could ever start
    remedies   what would make it run
    absences   why a workload has no pod, and what became of a pod that is gone
    objects    the same as JSON
"""

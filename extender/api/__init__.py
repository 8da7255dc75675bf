"""The verbs of a scheduler extender over HTTP: filter, prioritize, preempt, bind, and inspect for people.

Comes in: requests of kube-scheduler. Goes out: answers.

    app      the paths, and when a call is not answered (standby, not ready, busy)
    verbs    what filter, prioritize, preempt and inspect answer
    metrics  the extender's metrics
"""

"""The verbs of a scheduler extender over HTTP: filter, prioritize, preempt, bind, and inspect for people.

Comes in: requests of kube-scheduler. Goes out: responses.

    app      the paths, and when a call is not served (standby, not ready, busy)
    verbs    the results of filter, prioritize, preempt and inspect
    metrics  the extender's metrics
"""

"""The verbs of a scheduler extender over HTTP: filter, prioritize, preempt, bind, and inspect for people.

Input: requests of kube-scheduler. Output: responses.

    app      the paths, and when a call is not served (standby, not ready, busy)
    verbs    the results of filter, prioritize, preempt and inspect
    metrics  the extender's metrics
"""

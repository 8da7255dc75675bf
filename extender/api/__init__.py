"""The verbs of a scheduler extender over HTTP: filter, prioritize, preempt, bind, and inspect for people.

Comes in: requests of kube-scheduler. Goes out: answers, each out of one turn at the state.

Read first: `app` (paths), then `verbs` (what each answers).
"""

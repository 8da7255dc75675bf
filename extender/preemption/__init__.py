"""Which pods must go for a pod or for a gang.

Comes in: the victims that kube-scheduler offers, by node. Goes out: ours, and what is to be kept for the pod meanwhile
(`cache.nominations`). Pods that kube-scheduler never preempts for are left to `controllers.evictions`.

Read first: `preemption`; `gangpreemption` is the same for members of gangs.
"""

"""Which pods must go for a pod or for a gang, and the cards that are kept for it meanwhile.

Comes in: the victims that kube-scheduler offers, by node. Goes out: ours. Pods that kube-scheduler never preempts for
are left to `controllers.evictions`.

Read first: `preemption`; `gangpreemption` is the same for members of gangs.
"""

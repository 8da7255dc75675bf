"""Which pods must go for a pod or for a gang, and the cards that are kept for it meanwhile.

Comes in: the victims that kube-scheduler offers. Goes out: ours, by node; who nobody helps is left to `controllers.evictions`.
Read first: `preemption`; `gangpreemption` is the same for members of gangs.
"""

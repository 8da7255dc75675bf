"""Which pods must go for a pod or for a gang.

Comes in: the victims that kube-scheduler offers, by node. Goes out: ours, and what is kept for the pod meanwhile
(`cache.nominations`). The search for victims is in `cardwise.core.preemption`. Pods for which kube-scheduler never
preempts are left to `controllers.evictions`.

    preemption      the answer for one pod, and which evictions are still wanted
    gangpreemption  the same for a member of a gang, with a look at the whole gang
"""

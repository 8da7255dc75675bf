"""Preemption: which pods must be evicted for a pod or for a gang.

Input: the victims that kube-scheduler offers, by node. Output: the extender's victims, and the reservation for the
pod meanwhile (`cache.nominations`). The search for victims is in `cardwise.core.preemption`. `controllers.evictions`
evicts for pods for which kube-scheduler never preempts.

    preemption      the result for one pod, and which evictions are still needed
    gangpreemption  the same for a member of a gang, by the needs of the whole gang
"""

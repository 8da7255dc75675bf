"""Preemption: which pods must be evicted for a pod or for a gang.

Input: the victims that kube-scheduler proposes, by node. Output: the extender's victims, and the reservation for the
pod until the victims are gone (`cache.nominations`). The search for victims is in `cardwise.core.preemption`.
kube-scheduler never preempts for some pods; for these, `controllers.evictions` evicts the victims.

    preemption      the victims for one pod, and which evictions are still needed
    gangpreemption  the victims for a member of a gang, chosen for the whole gang
"""

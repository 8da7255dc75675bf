"""The scheduling queue: the pending pods, why each pod is pending, and which events requeue it.

Input: records of pods without a node, refusals of filter, and freed capacity. Output: the node to annotate so that
kube-scheduler tries pending pods again, and the next pod for `nomination`.

    schedulingqueue  one row for each pending pod, and their order
    nominationorder  the pods that may be nominated, in kube-scheduler's order
    searchpauses     pauses of namespaces after long searches
"""

"""The scheduling queue: the pending pods, why each is pending, and what would requeue it.

Comes in: records of pods without a node, refusals of filter, and that capacity may have been freed. Goes out: which
node to change, so that kube-scheduler tries pending pods again; and which pod is next for `nomination`.

    schedulingqueue  one row for each pending pod, and their order
"""

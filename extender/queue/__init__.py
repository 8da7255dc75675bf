"""The scheduling queue: the waiting pods, why each waits, and what would wake it.

Comes in: records of pods without a node, refusals of filter, and that room may have come. Goes out: which node to
change, so that kube-scheduler tries waiting pods again; and which pod is next for `nomination`.

    schedulingqueue  one row for each waiting pod, and their order
"""

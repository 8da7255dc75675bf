"""The pods that wait: why each waits, what would wake it, whose turn it is, and which node it is nominated for.

Comes in: records of pods without a node, and refusals. Goes out: who is to be woken, and nominations.

Read first: `waitingpods`, then `nominations` (after a preemption) and `ahead` (before kube-scheduler comes to a pod).
"""

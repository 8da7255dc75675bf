"""The pods that wait: why, what would wake them, whose turn it is, and the room that is named for them ahead.

Comes in: records of pods without a node, and refusals. Goes out: who is to be woken, and nominations.

Read first: `waitingpods`, then `nominations` (after a preemption) and `ahead` (before kube-scheduler comes to a pod).
"""

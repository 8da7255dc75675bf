"""The pods that wait: why each waits, what would wake it, whose turn it is, and which node it is nominated for.

Comes in: records of pods without a node, and refusals. Goes out: who is to be woken, and which node a pod gets ahead.

Read first: `waitingpods`, then `ahead` (pods that have a node before kube-scheduler comes to them) and `reserve` (nodes
that are kept for a gang that has waited long).
"""

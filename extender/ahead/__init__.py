"""What waiting pods have before kube-scheduler comes to them.

Comes in: who is next in the queue, and which gangs have waited long. Goes out: which node a pod gets ahead, and which
nodes are kept for a gang.

Read first: `ahead` (pods that are given a node), then `reserve` (nodes that are kept for a gang that has waited long).
"""

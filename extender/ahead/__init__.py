"""Decisions ahead of kube-scheduler: cards for waiting pods.

Comes in: who is next in the queue. Goes out: the node that a pod gets ahead.

    ahead    gives waiting pods a node and cards ahead of kube-scheduler
"""

"""Nomination: nodes and cards for pending pods before kube-scheduler asks.

Comes in: the next pods in the queue. Goes out: the nominated node of a pod.

    nominator    gives pending pods a node and cards before kube-scheduler asks
"""

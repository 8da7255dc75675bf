"""Nomination: nodes and cards for pending pods before kube-scheduler calls filter.

Input: the next pods in the queue. Output: the nominated node of a pod.

    nominator    gives pending pods a node and cards before kube-scheduler asks
"""

"""Compares the processes on the cards with what was granted, reports differences, and may evict.

Comes in: processes of the host and pods of the node. Goes out: events, metrics, evictions.

    audit     the loop
    findings  the rules: what processes have against what was granted
    owners    the pod of a process
    usage     GPU memory in use by container, for `cardwise top`
    evicting  evicts violators, so many an hour
"""

"""Defragmentation: how much idle room is in pieces too small to use, and which pods to move to join them.

Comes in: the ledger, what a workload asks, who may be moved. Goes out: memory in fragments; moves, one after another.

    defrag         the search for the fewest moves
    moving         one move: evicted, made anew, placed
    fragmentation  the measure (loads numpy)
"""

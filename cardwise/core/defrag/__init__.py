"""Defragmentation: how much idle memory is too fragmented to use, and which pods to move to make it usable.

Input: the ledger, the workload's requests, the pods that may be moved. Output: fragmented memory; moves in order.

    defrag         the search for the fewest moves
    moving         one move: eviction, recreation, placement
    fragmentation  the measure (imports numpy)
"""

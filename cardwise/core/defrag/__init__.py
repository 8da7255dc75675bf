"""Defragmentation: how much idle room is in pieces too small to use, and which pods to move to join them.

Comes in: the ledger, what a workload asks, who may be moved. Goes out: memory in fragments; moves, one after another.

Read first: `defrag` (the search), `moving` (what a move really does), `fragmentation` (the measure; loads numpy).
"""

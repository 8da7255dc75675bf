"""Room in one piece: how much of what is idle nobody can use, and which pods to move for something big.

Comes in: the ledger, what a workload asks, who may be moved. Goes out: memory in fragments; moves, one after another.

Read first: `defrag` (the search), `moving` (what a move really does), `fragmentation` (the measure; loads numpy).
"""

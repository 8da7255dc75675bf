"""Compares the processes on the cards with what was granted, reports differences, and may evict.

Comes in: processes of the host and pods of the node. Goes out: events, metrics, evictions.

Read first: `audit`, then `findings` (pure: what processes have against what was granted).
"""

"""Who really is on the cards, held against what was granted; who is found out is told of, and may be evicted.

Comes in: processes of the host and pods of the node. Goes out: events, metrics, evictions.

Read first: `audit`, then `findings` (pure: what processes have against what was granted).
"""

"""Who really is on the cards, held against what was granted; who is found out is told of, and may be evicted.

Comes in: processes of the host and pods of the node. Goes out: events, metrics, evictions.

Read first: `audit`; what it compares is pure (`cardwise.core.audit`).
"""

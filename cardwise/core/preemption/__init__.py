"""Who must go so that a pod fits, and why a pod waits: one search answers both.

Comes in: the ledger, who may be evicted, a request. Goes out: the fewest and least important victims; the explanation.

Read first: `preemption` (a node), `cardvictims` (its cards), `setcover` (the search); `explanation` is what people see.
"""

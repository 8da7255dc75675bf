"""Where a request fits and which cards it takes: the one placement engine, and the ledger that it asks.

Comes in: cards and devices of nodes, who holds what, a `PodRequest`. Goes out: a `Placement`, or why each node refuses.

Read first: `placement` (nodes by cards alone), `fitting` (one claim on one node), `searching` (all claims of a pod),
`ledger` (who holds what) over `nodestate` (what is left); then `scored` (policies that look at the workload).
"""

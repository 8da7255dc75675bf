"""Kubernetes, as the parts need it: calls, watches, leases, events, and one look at a cluster.

Comes in: credentials. Goes out: objects as structs, changes as they come, who leads, what users are told.

Read first: `client` (requests; `paths`, `errors` and `wire` are its words), `watch` (lists kept in step), `leases` (who
leads), `pods` (what they take, where they may be, how they go), `events`, `survey` (all of a cluster, once).
"""

"""Leader election by a Lease of coordination.k8s.io.

Read first: `election` (pure: what to send next, what an answer means), then `lease` (the thread that does it).
"""

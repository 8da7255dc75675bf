"""Leader election by a Lease of coordination.k8s.io.

Input: the Lease as the API server has it. Output: whether this process leads, and in which epoch.

Read first: `election` (pure: what to send next, what an answer means), then `lease` (the thread that does it).
"""

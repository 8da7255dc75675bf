"""Leader election by a Lease of coordination.k8s.io.

Input: the Lease in the API server. Output: whether this process is the leader, and in which epoch.

Read first: `election` (without I/O: which request to send next, what a response means), then `lease` (the thread that
sends the requests).
"""

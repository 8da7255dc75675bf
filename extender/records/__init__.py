"""What is read: pods, nodes, our own objects and the calls of kube-scheduler, each as one record out of its JSON.

Comes in: JSON of the API server and of kube-scheduler. Goes out: immutable records, which keep only what decisions need.
Read first: `projection` (pods and nodes), then `objects` (cards, classes, quotas), `wire` (calls).
"""

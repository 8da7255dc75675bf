"""What is read: pods, nodes, our own objects and calls of kube-scheduler, each as one record out of its JSON.

Comes in: JSON of the API server and of kube-scheduler. Goes out: records that never change and keep only what
decisions need.

Read first: `pod` (pods to be placed), then `podinfo` (bound pods), `nodeinfo`, `objects` (cards, classes, quotas) and
`wire` (calls).
"""

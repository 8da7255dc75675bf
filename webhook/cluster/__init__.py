"""The webhook's view of the cluster, besides the object under review.

Input: lists that reflectors keep. Output: defaults, classes, cards, quotas, bounds, numbers of gangs.

Read first: `view`, which implements what `server.decisions` needs; `offers` has the resources of nodes, `cards` the
sizes and numbers of their cards. `ondemand` requests what no watch shows: objects created a moment ago, the number of
pods that a gang needs, whether the API server serves Kubernetes' PodGroups.
"""

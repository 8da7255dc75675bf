"""The webhook's view of the cluster, besides the object under review.

Input: lists that reflectors keep. Output: defaults, classes, cards, quotas, bounds, numbers of gangs.

Read first: `view`, which implements `pods.context.Lookups`. `offers` has the resources of nodes, `cards` the sizes
and numbers of their cards. `ondemand` requests data that the watches lack: new objects, the number of pods that a gang
needs, and whether the API server serves Kubernetes' PodGroups. `namespaces`, `gpuquotas` and `limitranges` read what
the rules need of these objects.
"""

"""What commands read of the cluster beyond `cardwise.kube.survey`, in core's terms; the moves they make there.

Comes in: a client. Goes out: nodes and pods to simulate, pods that may be moved, who uses what, cordons.

Read first: `snapshots` (the cluster as something to simulate), `engine` (where the extender would place a pod).
"""

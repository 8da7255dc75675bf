"""The device plugin: reports a node's cards to the cluster and gives containers their share.

Comes in: calls of the kubelet, the node's cards and devices, its pods. Goes out: CDI devices for containers, grants on
the node's disk, and the node's capacities and cards in the API server. Read first: `grants.prestart`.

The rooms, none of which imports from one above it: `process` (the parts put together), `plugin` (what the kubelet
calls), `publish` (what the cluster is told of this node), `grants` (which container has which card), `sources`
(kubelet, runtime, API server), `api` (generated gRPC).
"""

"""The node agent: cards into the cluster, shares into containers.

The rooms, none of which imports from one above it: `agent` (the parts put together), `plugin` (what the kubelet
calls), `publish` (what the cluster is told of this node), `grants` (who has which card), `sources` (whom we ask),
`api` (generated gRPC).
"""

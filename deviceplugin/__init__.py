"""The device plugin: publishes a node's cards and devices to the cluster, and gives each container its share.

Input: calls of the kubelet, the node's cards and devices, its pods. Output: CDI specs for containers, grants on
the node's disk, and the node's capacities and ExtendedResources in the API server. Read first: `grants.granting`.

The packages and modules; each imports only from those below it:

    process  creates and connects the components
    plugin   the service that the kubelet calls
    publish  writes to the API server
    grants   grants of cards to containers
    sources  clients of kubelet, runtime and API server
    api      generated gRPC
"""

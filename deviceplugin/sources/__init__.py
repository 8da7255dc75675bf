"""Clients of the kubelet, the container runtime and the API server. They read; nothing here decides.

Input: their responses. Output: records of them.

The modules:

    kubelet     which container has a slot: PodResources and the device checkpoint
    containers  which containers are alive: the container runtime (CRI)
    pods        the pods of this node: the API server
    classes     the ResourceClasses: the API server
    calls       gRPC calls
"""

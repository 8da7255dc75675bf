"""Clients that read from the kubelet, the container runtime and the API server.

Input: responses. Output: records of pods, containers and slots.

The modules:

    kubelet     the containers of each slot, from PodResources and the device checkpoint
    containers  the live containers, from the container runtime (CRI)
    pods        the pods of this node, from the API server
    classes     the ResourceClasses, from the API server
    calls       gRPC calls
"""

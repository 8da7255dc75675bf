"""Readers of the kubelet (whose slot is it), the container runtime (what is alive), the API server (pods, classes).

Comes in: answers. Goes out: records of them. Nothing here decides.

    kubelet     whose container a slot is: PodResources and the checkpoint
    containers  which containers are alive, by the container runtime
    pods        the pods of this node
    classes     the ResourceClasses
    calls       gRPC calls
"""

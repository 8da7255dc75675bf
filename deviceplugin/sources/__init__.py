"""Readers of the kubelet (whose slot is it), the container runtime (what is alive), the API server (pods, classes).

Comes in: answers. Goes out: records of them. Nothing here decides.

Read first: `kubelet`.
"""

"""What the kubelet calls: the DevicePlugin service with its slots, and its registration.

Comes in: Allocate and PreStartContainer, which know nothing but slots. Goes out: CDI devices, once `grants` has found
whose slot it is.

Read first: `server`, then `registration` (restarts of the kubelet and ours).
"""

"""The services that the kubelet calls, DevicePlugin with its slots and DRAPlugin, and their registration with it.

Input: calls of Allocate and PreStartContainer, which name only slots, and of NodePrepareResources, which names a claim.
Output: names of CDI devices, whose specs `grants` writes.

    server        the gRPC service
    slots         the IDs and the list of the slots
    registration  registers with the kubelet, again when the kubelet or this process was restarted
    claimserver   the same for ResourceClaims: the DRA plugin, which the kubelet finds by its socket
    serving       gRPC on a Unix socket
"""

"""The DevicePlugin service that the kubelet calls, with its slots, and its registration with the kubelet.

Input: calls of Allocate and PreStartContainer, which name only slots. Output: names of CDI devices, whose specs
`grants` writes.

    server        the gRPC service
    slots         the IDs and the list of the slots
    registration  registers with the kubelet, again when the kubelet or this process was restarted
"""

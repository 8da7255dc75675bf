"""The DevicePlugin service that the kubelet calls, with its slots, and its registration with the kubelet.

Input: Allocate and PreStartContainer, which name only slots. Output: CDI devices, once `grants` has identified the
container that has a slot.

    server        the gRPC service
    slots         the IDs and the list of the slots
    registration  registers with the kubelet, again when the kubelet or this process was restarted
"""

"""What the kubelet calls: the DevicePlugin service with its slots, and its registration.

Comes in: Allocate and PreStartContainer, which know nothing but slots. Goes out: CDI devices, once `grants` has found
whose slot it is.

    server        the gRPC service
    slots         names, number and list of the slots
    registration  registers with the kubelet, again when the kubelet or this process was restarted
"""

"""bind: the one write that puts a pod on its node, with its cards.

Input: the bind call. Output: a Binding, or an error.

    binder       posts the Binding of a call, and handles a lost response
    permit       binds of gang members that wait for the other members, each in its thread
    throttle     delays filter while too many binds are in progress
    claimwriter  the other way to publish a decision: an allocated ResourceClaim, and the pod's gate
"""

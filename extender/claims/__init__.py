"""Claims: the extender as the scheduler of pods whose shares are allocated by ResourceClaim (scheduler.mode=claims).

Input: the state. Output: claims, nominated nodes and opened gates; an unconfigured kube-scheduler then binds the pods.

    claimscheduler  plays kube-scheduler's part for gated pods: chooses their nodes in order, publishes the decisions
    protection      checks the admission policies that protect claims, before this process leads
    takeback        reads pods and claims after a refusal or a lost answer, deletes claims; the fence of a new leader
"""

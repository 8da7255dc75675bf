"""Kubernetes, as the parts need it: calls, watches, leases, events, and one look at a cluster.

Comes in: credentials. Goes out: objects as structs, changes as they come, who leads, what users are told.

    client       requests to the API server; `credentials`, `kubeconfig`: where it is and who we are; `transport`:
                 connections whose answers have a deadline
    paths        URL paths, selectors; `errors`: what a call may raise; `backoff`: how long to wait before the next try
    recovery     one success after an outage ends the pauses of all
    wire         objects as structs; `nesting`: JSON that is nested too deep for them
    watch        lists kept in step with the API server; `watching`: one watch request
    cardspernode    limits how many cards of a node are kept
    leases       who leads
    events       a recorder of Events; `fairqueueing`: whose write is next
    pods         what pods take, where they may be, how they are evicted
    survey       all of a cluster, once; `mpsread`: MPS of cards and pods
"""

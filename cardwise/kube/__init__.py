"""Kubernetes for all components: API calls, watches, leases, events, and the state of the whole cluster.

Input: credentials. Output: objects as structs, changes, the leader, Events for users.

    client        requests to the API server; `credentials`, `kubeconfig`: its address and the credentials; `transport`:
                  connections with a deadline for the response
    paths         URL paths, selectors; `errors`: exceptions of calls; `backoff`: pauses between attempts
    recovery      ends the pauses of all loops when a call succeeds after an outage
    objects       one record for each kind of object
    wire         lists and watch events; `nesting`: JSON that is nested too deep for msgspec
    watch         reflectors: lists kept up to date; `watching`: one watch request
    cardspernode  limits the cards that are kept per node
    leases        leader election
    events        a recorder of Events; `fairqueueing`: the order of writes
    pods         pods: their load, eligible nodes and eviction
    clusterstate  reads the whole cluster once
"""

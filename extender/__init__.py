"""The scheduler extender: chooses GPUs for pods, alone and in gangs, and publishes the state of the cluster's GPUs.

Input: kube-scheduler's calls, and watch events. Output: Bindings, evictions, statuses, events. Read first:
`state`, then `cache.reservations`.

The packages and modules in the order of imports. A module imports only from modules below it:

    process       creates, starts and stops the components
    informers     watches
    cardreports   limits how many card reports the extender handles for each node
    claims        schedules pods whose shares are allocated by ResourceClaim
    api           verbs over HTTP
    controllers   loops that write
    reporting     statuses and events for people
    binding       posts Bindings
    leadership    which extender serves calls
    state         the root of the packages below, and their lock
    preemption    which pods are evicted for a pod or gang
    gangs         groups of pods that are placed together
    nomination    chooses nodes and cards for pending pods before kube-scheduler calls filter
    placing       chooses a node and cards for a single pod
    cache         the ledger and its reservations
    queue         pending pods
    records       decoded objects
"""

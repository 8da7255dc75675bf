"""The one placement engine: where a request fits and which cards it takes; and the ledger that it asks.

Comes in: cards and devices of nodes, who holds what, a `PodRequest`. Goes out: a `Placement`, or why each node refuses.

    placement    the best of many nodes, by cards alone. Read this first
    fitting      one claim on one node: which cards may be used, and which of them the policy takes
    searching    all claims of a pod on one node
    ledger       who holds what, and snapshots of it
    holding      what one pod holds on its node
    nodestate    what is left on the cards of one node
    locations    which nodes report a card or device, by UUID
    cardindex    open cards by free memory, so that not every node is asked
    memoryindex  nodes by memory: why none of thousands has so much
    kinds        one small integer for cards with the same classes, model and priority
    totals       what there is of each class and quota, what is used of it, and by whom
    devices      devices that are no GPUs
    mpstaints    which pods share a card's MPS
    scored       policies that look at all nodes and the workload (a package of its own)
"""

"""The placement engine: where a request fits and which cards it takes; and the ledger that it uses.

Input: cards and devices of nodes, the holdings of pods, a `PodRequest`. Output: a `Placement`, or a refusal per node.

    placement    the best of many nodes, by the policies that compare only cards. Read this first
    fitting      one card request on one node: the usable cards, and the cards that the policy takes
    searching    all card requests of a pod on one node
    ledger       the holdings of pods, and snapshots of it
    holding      the cards and devices that one pod holds
    nodestate    the free amounts of one node's cards
    nodesbyuuid  which nodes report a card or device, by UUID
    cardindex    open cards by free memory, so that not every node is checked
    memoryindex  nodes by memory: refuses thousands of nodes without checking each
    kinds        one small integer for cards with the same classes, model and priority
    totals       for each class and quota: the total, the used part, and the pods that use it
    devices      devices other than GPUs
    mpstaints    which pods may share a card's MPS
    scored       policies that compare all nodes for the workload (a package of its own)
"""

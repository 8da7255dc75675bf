"""The placement engine and its ledger: the nodes where a request fits, and the cards that the request takes.

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
    cardtenants  which namespaces may share a card
    scored       policies that compare all nodes for the workload (a package of its own)

Public seam: `Ledger`, live or as a snapshot, and the functions that read it. The extender, `explain`, `simulate` and
`defrag` use only these modules of the engine: `ledger`, `holding`, `nodestate`, `fitting`, `placement`, `totals` and
`scored.engine`. Import contracts hold this for the command line, the simulator and defragmentation. Example, where a
pod of 8,192 MiB would be placed; the ledger itself does not change:

    >>> from cardwise.core.api.cards import Card
    >>> from cardwise.core.api.request import ContainerRequest, PodRequest
    >>> from cardwise.core.placement import holding, ledger, placement
    >>> cards = ledger.Ledger()
    >>> _ = cards.set_cards("n1", [Card(index=0, uuid="GPU-1", model="T4", mem=15360)])
    >>> pod = PodRequest(containers=(ContainerRequest(key="0", name="main", cards=1, mem=8192),))
    >>> snapshot = cards.snapshot()
    >>> assignment = placement.place(snapshot, ["n1"], pod, "binpack").assignment
    >>> snapshot.set_holding(holding.Holding("uid-1", "default", "web", "n1", assignment))
    >>> snapshot.node("n1").free, cards.node("n1").free
    ([7168], [15360])
"""

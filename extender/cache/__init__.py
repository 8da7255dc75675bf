"""The cache: node reports, reservations and nominations, and the ledger of cards that results from them.

Input: records, and what filter and bind decide. Output: where a pod fits, what is free, and what is reserved for
which pod.

`extender.state` holds the one lock. Only `nodesearch` and `scoredpolicies` take it themselves.

    reservations    which pod has which cards: one row for each pod, and the life of a row. Read this first
    nominations     which cards are reserved for which pod after a preemption
    nominated       those cards as holdings, for a placement that must not use them; the search for victims
    gangcards       the cards of the gang reservation as holdings, for a placement that must not use them
    capacity        applies each change of a row to the ledger and the nodes' totals, and requeues pods when capacity
                    is freed
    clusterview     all that planners read, live or as a snapshot; what has changed since a snapshot
    cache           makes these; checks a plan again at bind
    placing         asks the placement engine for one pod; `nodesearch`: the same for pods with several card requests,
                    on a snapshot
    scoredpolicies  the engine of the scored policies, made when it is first needed
    inventory       what nodes report of cards and devices
    membership      which ResourceClasses each card is in
    nodeload        cpu, memory and number of pods of each node
    quotas          GPUQuotas by namespace, and their remaining amounts
    statelock       the lock, which measures how long it is held; `yielding`: long work under it in short slices;
                    `pacing`: pauses for long work without it
"""

"""The cache: node reports, reservations and nominations, and the ledger of cards that is computed from all three.

Input: records, and the decisions of filter and bind. Output: the free capacity, the reservations of each pod, and
snapshots of both for planners.

All these modules use the lock of `extender.state`.

    reservations    which pod has which cards: one row for each pod, and the life of a row. Read this first
    claimed         pods whose shares are allocated by ResourceClaim: which to plan, which claims to take back
    deadlines       times by key; finds the next ones without a walk
    nominations     which cards are reserved for which pod after a preemption
    nominated       the nominated pods' cards as holdings, which other pods must not use; the search for victims
    gangcards       the cards of the gang reservation as holdings, for a placement that must not use them
    capacity        applies each change of a row to the ledger and the nodes' totals, and requeues pods when capacity
                    is freed
    clusterview     the data that planners read, live or as a snapshot; the changes since a snapshot
    cache           creates the components above; checks a plan again at bind
    inventory       the cards and devices that nodes report
    membership      which ResourceClasses each card is in
    nodeload        cpu, memory and number of pods of each node
    quotas          GPUQuotas by namespace, and their remaining amounts
    statelock       the lock, which measures how long it is held; `pacing`: how long work may last under the lock,
                    and pauses for work without it
    commit          the check of a plan that was made on a snapshot, before its places are reserved
"""

"""The search for victims: which pods must go so that a pod fits. The same search explains why a pod waits.

Comes in: the ledger, who may be evicted, a request. Goes out: the fewest and least important victims; the explanation.

    preemption   victims on one node, by its cards and its sums. Read this first
    cardvictims  which cards of the node to clear
    setcover     the cheapest set of pods that frees enough
    explanation  why a pod waits, for `cardwise explain`
"""

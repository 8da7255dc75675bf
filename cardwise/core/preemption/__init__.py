"""The search for victims: the pods whose eviction lets another pod fit. The same search explains why a pod is pending.

Input: the ledger, the pods that may be evicted, a request. Output: the fewest and least important victims; the
explanation.

    preemption   victims on one node, considering its cards and its totals. Read this first
    cardvictims  which cards of the node to clear, and so the victims
    setcover     the cheapest set of pods that frees enough
    explanation  why a pod is pending, for `cardwise explain`
"""

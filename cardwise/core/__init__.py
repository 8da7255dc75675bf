"""The domain: pure functions and values. Standard library only; `placement.scored` and `defrag` also use numpy.

Input: decoded JSON, amounts, times. Output: placements, victims, moves, or the reason why there is none.

The packages; each imports only packages that are named after it: `defrag` (which pods to move, how much memory is
fragmented), `preemption` (which pods to evict, why a pod is pending), `gangs` (members, phases and plans of gangs),
`placement` (nodes, cards, the ledger and the placement engine), `api` (the formats of annotations and custom
resources), `values` (numbers, texts, errors).
"""

"""The domain: pure functions and values, standard library only (numpy for scores and fragments: `placement.scored`,
`defrag`).

Comes in: decoded JSON, amounts, times. Goes out: placements, victims, moves, or a reason why there is none.

The rooms, none of which imports from one above it: `defrag` (which pods to move, how much is in pieces), `preemption`
(who goes, why a pod waits) and `gangs` (who belongs together, how far it is, where it fits), `placement` (nodes, cards,
the ledger and the one engine), `api` (what users and parts write to each other), `values` (numbers, texts, errors).
"""

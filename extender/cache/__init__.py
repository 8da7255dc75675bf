"""The cache: what nodes report, what pods hold or may come to hold, and the ledger of cards that follows.

Comes in: records, and what filter and bind decide. Goes out: where a pod fits (`placing`), what is free, and what is
kept from whom (`nominated`).

Nothing here locks but what says so (`longsearch`, which searches in turns): `extender.state` holds the one lock,
`statelock`.

Read first: `reservations` (who has room, and the life of each row), `nominations` (what is kept for whom after a
preemption), `cache` (how ledger and sums follow).
"""

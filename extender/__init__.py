"""The scheduler extender: places pods card by card, alone and in gangs, and tells the cluster of its cards.

Comes in: kube-scheduler's calls, and what watches see. Goes out: Bindings, evictions, statuses, events. Read first:
`state`, then `cache.reservations`.

The rooms, in the order of imports, none from one above it: `process` (the parts and their order), `informers`
(watches), `cardreports` (reports of cards, limited by node), `api` (verbs over HTTP),
`controllers` (loops that write), `reporting` (what people see), `binding` (the
write of a decision), `leadership` (who answers), `state` (the root of the rooms below, and their lock), `preemption`,
`gangs`, `nomination` (nodes and cards for pending pods before kube-scheduler asks), `cache` (the ledger and its
reservations), `queue` (pending pods), `records` (decoded objects).
"""

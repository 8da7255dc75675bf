"""Gangs: which pods belong together, where they are planned, and when all of them may be bound.

Comes in: members, the nodes that filter was offered, binds that wait. Goes out: plans that reserve cards, and the
permits of binds that wait. The phase of one gang, and where it fits, is decided in `cardwise.core.gangs`.

    gangs        what is decided about members at filter and bind, and with time. Read this first
    gangplaces   plans: what was offered, what was tried in vain, the rows that reserve cards
    reservation  cards that are reserved for a gang that has waited long; `cardsearch` chooses them
    gangqueue    the order in which pending gangs are planned
    bindthreads  which gangs may wait in bind if threads are too few
    gangtypes    types: settings, `Permit` (the outcome that binds wait for), the writes that are due
    gangviews    how far a gang is, for PodGroups, events and metrics
    podgroups    PodGroups: what they ask for, and what their statuses should say

Not here: `cache.gangcards` hides reserved cards from later pods; `binding.permit` is where members wait in bind.
"""

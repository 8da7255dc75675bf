"""Gangs: which pods belong together, where they are planned, and when all of them may be bound.

Comes in: members, the nodes that filter was offered, binds that wait. Goes out: plans that hold cards, and the outcome
for the binds that wait. How far one gang is, and where it fits, is decided in `cardwise.core.gangs`.

    gangs        what is decided about members at filter and bind, and with time. Read this first
    gangplaces   plans: what was offered, what was tried in vain, the rows that hold cards
    reservation  cards that are reserved for a gang that has waited long; `cardsearch` finds which
    gangqueue    the order in which pending gangs are planned
    bindthreads  which gangs may wait in bind where threads are too few
    gangtypes    types: settings, `Permit` (the outcome that binds wait for), what is to be written
    gangviews    how far a gang is, for PodGroups, events and metrics
    podgroups    PodGroups: what they ask for, and what their statuses should say

Not here: `cache.gangcards` hides reserved cards from later pods; `binding.permit` is where members wait in bind.
"""

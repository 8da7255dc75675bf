"""Gangs: which pods belong together, their planned nodes and cards, and when all of them may be bound.

Input: members, the nodes that kube-scheduler offers in filter calls, waiting binds. Output: plans that reserve cards,
and permits for waiting binds. `cardwise.core.gangs` computes the phase of a gang, and the nodes that fit it.

    gangs        decisions about members at filter and bind, and after timeouts. Read this first
    gangplaces   plans: offered nodes, failed attempts, the rows that reserve cards; `gangplanner`: computes a plan in
                 a snapshot
    offers       the nodes that kube-scheduler has offered, by gang and shape of members
    reservation  cards that are reserved for a gang that has waited long; `cardsearch` chooses them in a snapshot
    gangqueue    the order in which pending gangs are planned
    bindthreads  which gangs may wait in bind if threads are too few
    gangtypes    types: settings, `Permit` (the outcome that binds wait for), the writes that are due
    gangviews    progress of gangs, for PodGroups, events and metrics
    podgroups    PodGroups: the settings in their specs, and the statuses to write

In other packages: `cache.gangcards` hides reserved cards from later pods; members wait in bind in `binding.permit`.
"""

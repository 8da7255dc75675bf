"""Reporting: statuses of Cardwise's objects, PodGroups, automatic classes, and events.

Input: the state, and the objects as the watch shows them. Output: the wanted status of each object, which is
compared with the current status and written at a bounded rate. `controllers/loops` runs the writers.

    statuses         the wanted statuses of cards, classes and quotas, from the ledger
    statuswriter     writes those that differ, and tries again after an error
    ledgercheck      counts cards on which ledger and cluster disagree for long
    schedule         which object is written next, and how many writes a second
    podgroupwriter   PodGroups, their statuses, and the events of members
    podevents        events for pods that wait for a quota or for a deleted class
    classcontroller  one automatic ResourceClass for each model of card
    listers          Cardwise's objects as the watch shows them, and which have changed
"""

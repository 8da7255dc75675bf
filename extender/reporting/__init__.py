"""Reporting: statuses of Cardwise's objects, PodGroups, automatic classes, and events.

Input: the state, and the objects as the watch shows them. Output: the desired status of each object. If the desired
status differs from the current one, it is written, at a limited rate. `controllers/loops` runs the writers.

    statuses         the desired statuses of cards, classes and quotas, from the ledger
    statuswriter     writes statuses that differ from the desired statuses, and retries after errors
    ledgercheck      counts cards on which ledger and cluster have disagreed for long
    schedule         chooses the object to write next, and limits the writes per second
    podgroupwriter   PodGroups, their statuses, and the events of members
    podevents        events for pods that wait for a quota or for a deleted class
    classcontroller  one automatic ResourceClass for each model of card
    listers          Cardwise's objects as the watch shows them, and the keys of changed objects
"""

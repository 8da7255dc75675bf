"""The output of commands: tables for people, objects for programs.

Comes in: a survey or a ledger; for gangs and the views of users without rights, a client that they read with. Goes out:
text and JSON.

    tables        every table
    printing      every JSON, and what could not be read
    cardtable     cards and devices, as `kubectl inspect gpushare`
    classtable    `classes`, of cards and of devices
    toptable      `top`, one line for each card; `livescreen`: its screen
    visibletable  what users see who may read no card
    quotatable    `quota`
    gangtable     `gangs`
    replays       runs of `simulate`; `plotting`: their plots
"""

"""The output of commands: tables for people, objects for programs.

Comes in: a ledger, or what `cluster` and the inventory of `core.placement` have made of one; nothing here
imports a client of the API server (an import contract). Goes out: text and JSON.

    tables        every table
    printing      every JSON, and what could not be read
    inspecttable  cards and devices, as `kubectl inspect gpushare`
    classtable    `classes`, of cards and of devices
    toptable      `top`, one line for each card; `livescreen`: its screen
    visibletable  what users see who may read no card (`cluster.visible`)
    quotatable    `quota`
    gangtable     `gangs`
    replays       runs of `simulate`; `plotting`: their plots
"""

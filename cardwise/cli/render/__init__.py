"""The output of commands: tables for people, objects for programs.

Input: a ledger, or what `cluster` and `core.placement.totals` derive from one. Nothing here imports a client of the API
server (an import contract). Output: text and JSON.

    tables        every table
    printing      every JSON, and warnings about lists that could not be read
    inspecttable  cards and devices, as `kubectl inspect gpushare`
    classtable    `classes`, of cards and of devices
    toptable      `top`, one line per card; `livescreen`: its screen
    visibletable  the view of users without the right to read cards (`cluster.visible`)
    quotatable    `quota`
    gangtable     `gangs`
    replays       runs of `simulate`; `plotting`: their plots
"""

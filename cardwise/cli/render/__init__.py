"""The output of commands: tables for people, objects for programs.

Input: a ledger, or values that `cluster` and `core.placement.totals` derive from one. No module imports a client of the
API server (an import contract). Output: text and JSON.

    tables        prints every table
    printing      prints every JSON, and warnings about lists that could not be read
    inspecttable  `inspect`: cards and devices, in the layout of `kubectl inspect gpushare`
    classtable    `classes`: classes of cards and of devices
    toptable      `top`: one line per card
    livescreen    the screen of `top`
    visibletable  tables for users without the right to read cards (`cluster.visible`)
    quotatable    `quota`
    gangtable     `gangs`
    replays       `simulate`: its runs
    plotting      the plots of `simulate`
"""

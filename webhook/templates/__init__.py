"""Names as users write them, in the templates of workloads and everywhere else.

Read first: `templates` (a workload), `spellings` (which name stands for which), `records` (what we have written).
"""

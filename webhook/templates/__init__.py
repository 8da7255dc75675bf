"""Names as users write them, in the templates of workloads and everywhere else.

Comes in: a workload with names in any spelling. Goes out: the workload with the names that the other parts know.

The modules:

    templates   rewrites a workload. Read this first
    spellings   which name stands for which
    records     the keys that we have written, so that a later edit drops them
    containers  puts changed containers back into their pod
"""

"""Names as users write them, in the templates of workloads and everywhere else.

The modules:

    templates   rewrites a workload. Read this first
    spellings   which name stands for which
    records     the keys that we have written, so that a later edit drops them
    containers  puts changed containers back into their pod
"""

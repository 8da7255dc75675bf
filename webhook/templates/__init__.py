"""Resource names as users write them, in templates of workloads and other objects.

Input: a workload with names in any spelling. Output: the workload with the names that the other components read.

The modules:

    templates   rewrites a workload. Read this first
    spellings   translates the names that users write into resources
    records     the keys that the webhook wrote, so that a later edit removes stale ones
    containers  replaces changed containers in their pod
"""

"""Resource names as users write them, in templates of workloads and other objects.

Input: a workload with names in any spelling. Output: the workload with the names that the other parts read.

The modules:

    templates   rewrites a workload. Read this first
    spellings   which name means which resource
    records     the keys that the webhook wrote, so that a later edit removes stale ones
    containers  puts changed containers back into their pod
"""

"""What a cluster would do with other pods, other policies or other nodes, by the engine that places the real ones.

Comes in: nodes and pods, of a cluster or of a trace. Goes out: by policy, what was placed, refused and left in pieces.

The modules:

    cluster    a simulated cluster around the real engine
    workload   nodes and pods to simulate; `traces`: those of a CSV file
    fill       pods come until the cluster is full; `churn`: pods come and go
    runs       many runs in several processes; `summary`: their means
    tally      who was refused, by size of request
    fragments  idle memory that no pod can use
    baselines  policies of others, for comparison
    defaults   the values of options that are not given
"""

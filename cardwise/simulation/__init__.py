"""Simulates placement with other pods, policies or nodes, using the engine that places the real pods.

Input: the nodes and pods of a cluster or of a trace. Output, by policy: placed pods, refused pods, fragmentation.

The modules:

    cluster    a simulated cluster around the real engine
    workload   nodes and pods to simulate; `traces`: those of a CSV file
    fill       pods arrive until the cluster is full; `churn`: pods arrive and leave
    runs       many runs in several processes; `summary`: their means
    refusals   counts of refused pods, by size of the request
    fragments  idle memory that no pod can use
    baselines  policies that other authors have published, for comparison
    defaults   default values of the options
"""

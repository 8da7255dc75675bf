"""The share agent: a native sidecar that waits for MPS, tells each container its share, and exports it.

Comes in: annotations of its pod, files of the MPS manager. Goes out: a file for each container, metrics, the answer to
the startup probe.

Runs in every pod that has it, so it is small: one thread, the standard library, and of Cardwise only what is pure or
reads the node's files.

    running     the thread: looks, writes, answers, and ends with the signal
    podshares   what it reads of its pod, writes for each container, and tells as metrics
    endpoint    the HTTP server
    probe       the startup probe's question to the agent
"""

"""The share agent: a native sidecar that waits for MPS, and publishes each container's share as a file.

Input: annotations of its pod, files of the MPS manager. Output: a file for each container, the response to the
startup probe.

The agent runs in many pods, so it is small. It has one thread, and imports only the standard library and modules of
Cardwise that are pure or read the node's files.

    running     the thread: checks the cards, writes files, answers requests
    podshares   the settings of the agent, and the file of each container (pure)
    endpoint    the HTTP server
    probe       the startup probe's request to the agent
"""

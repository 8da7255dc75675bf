"""The MPS node manager: runs one MPS daemon per card (or per node) with memory limits, checks its health, and ends it.

Input: the node's cards, processes and pods. Output: daemons with limits, state files for the device plugin, and
the MPS statuses of cards, events and evictions in the API server. Read first: `manager`, then `daemon.machine`.

The packages and modules; none imports from one above it:

    manager      all daemons of the node
    daemon       one daemon
    audit        which processes use the cards
    publication  writes MPS statuses
    host         processes and pods of the machine

`options` and `metrics` are those of the manager. `agent` is a separate program: the sidecar in pods.
"""

"""The MPS node manager: runs an MPS daemon with memory limits for each card (or one for the node), and checks the
daemons' health.

Input: the node's cards, processes and pods. Output: daemons with limits; state files for the device plugin; in the API
server, MPS statuses of cards, events and evictions. Read first: `manager`, then `daemon.machine`.

The packages and modules; each imports only from those below it:

    manager      runs all daemons of the node
    daemon       runs one daemon
    audit        checks which processes use the cards
    usage        measures what containers use of the cards
    publication  writes MPS statuses
    host         processes and pods of the node

`metrics` belongs to the manager. `agent` is a separate program, the share agent: the sidecar in pods.
"""

"""The MPS node manager: one daemon per card (or node), its limits, its health, and its end.

Comes in: the node's cards, processes and pods. Goes out: daemons with limits, files for the device plugin, and what the
cluster is told: MPS statuses of cards, events, evictions. Read first: `manager`, then `daemon.machine`.

The rooms, none of which imports from one above it: `manager` (all daemons of the node), `daemon` (one of them),
`audit` (which processes use the cards), `publication` (what the cluster is told), `host` (what is on the machine);
`options` and `metrics` of the manager. `agent` is a program of its own: the sidecar in pods.
"""

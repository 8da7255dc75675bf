"""The MPS node manager: one daemon per card (or node), its limits, its health, and its end.

The rooms, none of which imports from one above it: `manager` (all daemons of the node), `daemon` (one of them),
`audit` (who really is on the cards), `publication` (what the cluster is told), `host` (what is on the machine);
`options` and `metrics` of the manager. `agent` is a program of its own: the sidecar in pods.
"""

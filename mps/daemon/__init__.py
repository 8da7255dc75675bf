"""One MPS daemon and its servers: starts, limits, probes, recovers and ends them.

Input: the cards to serve and the memory limits of clients. Output: the status, for `publication`.

Read first: `machine` (the daemon's life as a state machine, pure), then `daemon` (which runs it).

The daemon: `child` (its process), `servers` (its MPS servers), `units` (the cards that it serves), `directories` (its
folder), `daemonlog` (its output). The cards: `computemode`, `ceilings` (memory limits of clients). Other processes:
`foreignprocesses` (programs that use a card without its daemon), `orphanedservers` (servers of a dead daemon),
`termination` (clients of terminating pods, which have to be detached).
"""

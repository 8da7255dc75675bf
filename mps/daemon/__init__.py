"""One MPS daemon and its servers: started, limited, probed, healed and ended.

Input: the cards to serve and the memory limits of clients. Output: the status, for `publication`.

Read first: `machine` (the daemon's life as a state machine, pure), then `daemon` (which runs it).

The process: `child` (the control daemon), `servers` (its MPS servers), `units` (which cards one daemon serves),
`directories` (its folder), `daemonlog` (its output). The cards: `computemode`, `ceilings` (memory limits of clients).
Processes: `foreignprocesses` (use a card without its daemon), `orphanedservers` (of a dead daemon), `termination`
(clients of terminating pods, to be detached).
"""

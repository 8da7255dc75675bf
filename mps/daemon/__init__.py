"""One MPS daemon and its servers: started, limited, watched, healed and ended.

Comes in: which cards it is to serve and how much each client may have. Goes out: how it is, for `publication`.

Read first: `machine` (its life as a table, pure), then `daemon` (which carries it out).

The process: `child` (the control daemon), `servers` (its MPS servers), `units` (which cards one daemon serves),
`directories` (its folder), `daemonlog` (what it says). The cards: `computemode`, `ceilings` (memory limits of clients).
Processes to be ended or told of: `strangers` (use a card without its daemon), `orphans` (of a dead daemon),
`termination` (clients of pods that end).
"""

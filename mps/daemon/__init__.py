"""One MPS daemon and its servers: started, limited, watched, healed and ended.

Comes in: which cards it is to serve and how much each client may have. Goes out: how it is, for `publication`.

Read first: `machine` (its life as a table, pure), then `daemon` (which carries it out).
"""

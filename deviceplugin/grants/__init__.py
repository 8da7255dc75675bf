"""Grants: which container has which card, from the check before its start to the proof that it has ended.

Comes in: a slot that is about to start. Goes out: a grant on the disk of the node and the CDI spec that opens the
card; later its release.

Read first: `prestart`, `grants` (what is on the disk), `release`.

What a container gets: `access` (by CDI or by environment), `cdi` (the spec of a slot), `environment`, `mpswait`. What
grants are compared with: `hardware`, and `adoption` for containers that run without one.
"""

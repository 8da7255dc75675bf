"""Grants: which container has which card, from the check before its start until all its pod's containers have ended.

Input: a slot whose container is about to start. Output: a grant on the disk of the node, and the CDI spec that
opens the card; later the grant's release.

Read first: `prestart`, `grants` (the store on disk), `release`.

What a container gets: `access` (by CDI or by environment), `cdi` (the spec of a slot), `environment`, `mpswait` (waits
for MPS). What grants are compared with: `hardware`, and `adoption` for containers that run without a grant.
"""

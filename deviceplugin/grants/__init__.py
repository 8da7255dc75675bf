"""Grants of cards to containers, from the check before a container starts until all containers of its pod have ended.

Input: the slot of a container that is about to start, or the claim of its pod. Output: a grant on the node's disk, and
a CDI spec with the card's device nodes. The grant is released later.

Read first: `granting`, `grants` (the store on disk), `release`.

How the kubelet asks: `prestart` (by slot, at each start), `claims` (by ResourceClaim, once for a pod), and
`startblocks` for the further starts of containers with a claim.

A container's access: `access` (by CDI or by environment), `cdi` (the spec of a slot), `environment`, `mpswait` (waits
for MPS), `waitslots` (which starts may wait). Checks of grants: `hardware` (the cards of this node), `adoption`
(containers that run without a grant).
"""

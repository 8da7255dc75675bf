"""The commands: one file each, named as the command, with its options and its way from the cluster to the screen.

Comes in: what a person typed. Goes out: text, JSON, an exit code; a few change the cluster (`cordon`, `drain`,
`defrag`, the probe pods of `doctor`).
"""

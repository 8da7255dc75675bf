"""The commands: one file each, with the command's name, its options, and its steps from the cluster to the output.

Input: the arguments. Output: text, JSON, an exit status; a few commands change the cluster (`cordon`, `drain`,
`defrag`, the probe pods of `doctor`).
"""

"""The commands: each has a file with the command's name, which contains its options and its steps.

Input: the arguments. Output: text, JSON, an exit status; a few commands change the cluster (`cordon`, `drain`,
`defrag`, the probe pods of `doctor`).
"""

"""The commands: one file for each, which has the command's name, with its options and its steps.

Input: the arguments. Output: text, JSON, an exit status; a few commands change the cluster (`cordon`, `drain`,
`defrag`, the probe pods of `doctor`).
"""

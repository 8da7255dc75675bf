"""The commands. Each file has the name of its command, and contains the command's options and steps.

Input: the arguments. Output: text, JSON, an exit status; a few commands change the cluster (`cordon`, `drain`,
`defrag`, the probe pods of `doctor`).
"""

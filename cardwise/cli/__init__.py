"""`cardwise`, the command line: shows the state of GPUs, pods and the installation, and changes a few things.

Input: arguments, and a cluster through its API server. Output: text, JSON, an exit status; some commands write:
cordons, evictions, probe pods.

The packages and modules, none of which imports one above it: `main` (the program), `commands` (one file per command,
with the command's name), `simulation` (of `simulate`), `explanation` and `doctor` (what `explain` and `doctor` find),
`render` (tables, bars, JSON), `cluster` (what is read of a cluster, and the engine over it), `options`, `rights`
(missing rights and the roles that grant them), `console` (printing), `signals` (that end a program).
"""

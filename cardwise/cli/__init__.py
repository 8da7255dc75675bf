"""`cardwise`, the command line: shows the state of GPUs, pods and the installation; some commands change it.

Input: arguments, and a cluster through its API server. Output: text, JSON, an exit status. Some commands write to the
cluster: cordons, evictions, probe pods.

The packages and modules; each imports only from those after it: `main` (the program), `commands` (one file per command,
with the command's name), `simulation` and `advice` (the implementations of `simulate` and `advise`), `explanation` and
`doctor` (the findings of `explain` and `doctor`), `render` (tables, bars, JSON), `cluster` (reads the cluster, and runs
the engine on what it has read), `options`, `rights` (missing rights and the roles that grant them), `console`
(printing), `signals` (the signals that end a program).
"""

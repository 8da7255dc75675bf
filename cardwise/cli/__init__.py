"""`cardwise`, the command line: what people look at, and the few things that they change.

Comes in: arguments, and a cluster through its API server. Goes out: text, JSON, an exit code; some commands write:
cordons, evictions, probe pods.

The rooms, none of which imports from one above it: `main` (the program), `commands` (one file a command, named as it),
`simulation` (what `simulate` does), `explanation` and `doctor` (what they have to say), `render` (tables, bars, JSON),
`cluster` (what is read of a cluster, and the engine over it), `options`, `rights` (that are missing), `console` (who
prints), `signals` (that end a program).
"""

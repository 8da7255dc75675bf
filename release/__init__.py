"""What a maintainer makes of the sources, by `make release`: images, packages, lists. Nothing of it runs in a cluster.

Comes in: the working tree of a commit. Goes out: dist/. CONTRIBUTING.md says how a release goes.

Read first: `__main__` (what is made, in order), `agentroot` (the share agent's image). `artifacts`: wheel, sources and
chart; `sbom`: the bill of materials; `readiness`: what is unfinished.
"""

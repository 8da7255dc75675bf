"""Builds the files of a release (`make release`). Nothing of it runs in a cluster.

Input: the working tree of a commit. Output: dist/. CONTRIBUTING.md has the steps of a release.

Start with `__main__` (all steps in order) and `agentroot` (the share agent's image). `artifacts`: wheel, sources and
chart; `readiness`: the checks before a release.
"""

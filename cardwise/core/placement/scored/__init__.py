"""Policies that compare all nodes by what the workload could still use of them; see docs/design/0008-policies.md.

The only part of the core that imports numpy, with `defrag.fragmentation`: nobody imports it who does not use such a
policy, or asks how fragmented the cards are.
"""

"""Pods as kube-scheduler and the disruption controller see them.

`loads` (what they take beside cards), `eligible` (where they might be), `budgets` and `eviction` (whether they may go).
"""

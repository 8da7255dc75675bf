"""Audits the processes on the cards against the grants of their pods, reports violations, and may evict pods.

Input: processes of the host and pods of the node. Output: events, metrics, evictions.

    audit          the loop that lists processes and reports violations
    findings       the rules: which use of a card is a violation (pure)
    evicting       evicts violators, a limited number per hour
"""

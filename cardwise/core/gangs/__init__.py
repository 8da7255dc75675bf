"""Gangs: pods that start together or not at all.

Input: pods and PodGroups, and times. Output: the phase of a gang, and nodes and cards for all its members.

    gangs      which pods belong together, and which of two gangs comes first
    gangstate  the phases of one gang, and its back-off
    gangplan   nodes and cards for all members of a gang, or for none
    roster     the members of one gang, counted
    capacity   an upper bound of how many members fit, so that most gangs that cannot fit are not planned
"""

"""What a maintainer makes of the sources: images, packages, lists. Nothing of it runs in a cluster.

Read first: `agentroot` (the share agent's image).
"""

"""The node agent: cards into the cluster, shares into containers."""

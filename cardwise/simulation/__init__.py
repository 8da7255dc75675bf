"""What a cluster would do with other pods, other policies or other nodes, by the engine that places the real ones."""

"""The domain: pure functions and values, standard library only."""

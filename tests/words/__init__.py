"""The check of names: `python -m tests.words` fails on names that the project does not use."""

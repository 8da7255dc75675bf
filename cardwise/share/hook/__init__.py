"""The hook's files.

They are a package only for the type checker and the import contracts. In a container the files are in a folder of
PYTHONPATH (`cardwise.share.installation`).
"""

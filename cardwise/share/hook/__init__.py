"""The hook's files. A package for the type checker and the import contracts only: in a container they lie in a folder
of PYTHONPATH, see `cardwise.share.installation`.
"""

"""`cardwise doctor`: what would not work, or does not, with a remedy for each finding.

`facts` reads the cluster, the checks are pure functions of what was read, `probing` and `exposure` try
what only a try can tell.
"""

"""`cardwise doctor`: what would not work, or does not, with a remedy for each finding.

Comes in: a client. Goes out: findings, and for a while probe pods.

`facts` reads the cluster, the checks are pure functions of what was read, `probing` and `exposure` try what only a try
can tell.

    checks     the checks in their order
    facts      what was read of the cluster, each thing once
    finding    a finding, and how it is shown
    repairs    commands that remedies give
    cluster    checks of Kubernetes, nodes, runtimes, other GPU plugins; `startup`: that pods of our own parts are
               created and run; `parts`: of what these parts write; `scheduler`: that kube-scheduler asks the extender;
               `waiting`: pods that the webhook has never seen; `units`: what a bare number of gpu-mem means;
               `limits`: classes without cards, quotas that count too little
    probing    probe pods: whether webhook and extender are asked
    exposure   that a pod that asks for no card gets none
    before     checks before the installation, which propose values of the chart; `bypasses`: what its policies would
               refuse in pods that are there
"""

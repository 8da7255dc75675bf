"""`cardwise doctor`: diagnoses the installation, with a remedy for each finding.

Input: a client. Output: findings, and temporary probe pods.

`facts` reads the cluster, the checks are pure functions of the facts, `probing` and `exposure` create probe pods.

    checks     the checks in their order
    facts      the facts of the cluster, each list read once
    finding    a finding, and its output
    repairs    commands in remedies
    cluster    checks of Kubernetes, nodes, runtimes, other GPU plugins; `startup`: that the pods of Cardwise's parts
    are
               created and run; `parts`: of what these parts write; `scheduler`: that kube-scheduler calls the extender;
               `waiting`: pods that were created without the webhook; `units`: the unit of bare gpu-mem numbers;
               `limits`: classes without cards, quotas that count too little
    probing    probe pods: whether webhook and extender are called
    exposure   that a pod without a GPU request gets no GPU
    before     checks before the installation, which propose values of the chart; `bypasses`: what its policies would
               refuse in existing pods
"""

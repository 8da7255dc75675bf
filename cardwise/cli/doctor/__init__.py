"""`cardwise doctor`: diagnoses the installation, with a remedy for each finding.

Input: a client. Output: findings, and temporary probe pods.

`facts` reads the cluster, the checks are pure functions of the facts, `probing` and `exposure` create probe pods.

    checks     the checks in their order
    facts      the facts of the cluster, each list read once
    finding     the findings, and their output
    repairs     the commands that remedies contain
    cluster     checks of Kubernetes, nodes, runtimes, other GPU plugins
    startup     checks that the pods of Cardwise's components are created and run
    components  checks of the objects that these components write
    policies    checks that the admission policies exist and are enforced
    claims      checks of scheduler.mode=claims
    scheduler   checks that kube-scheduler calls the extender
    waiting     checks of pods that were created without the webhook
    units       checks of the unit of gpu-mem numbers
    limits      checks of classes without cards, and of quotas that do not count some requests
    probing     checks by a probe pod that webhook and extender are called
    exposure    checks by probe pods that a pod without a GPU request gets no GPU
    before      checks before the installation, which propose values of the chart
    bypasses    finds existing pods that the chart's policies would refuse
"""

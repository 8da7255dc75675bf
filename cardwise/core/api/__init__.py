"""What users and the parts write to each other: one codec for each format, and nobody else reads it.

Comes in: decoded JSON of pods and of our objects. Goes out: requests, assignments, cards, classes, quotas, as values.

    request          what a pod asks of cards and devices. Read this first
    assignment       what it got: the annotations of a bound pod
    names            every name that leaves the process
    cards            a card as placement sees it
    cardlimits       what the extender gives of a card at most, in its ConfigMap
    classes          ResourceClass: a named type of card
    selectors        the label selector of a class
    quotas           GPUQuota: what a namespace may hold, and what each share counts
    policies         placement policies by cards alone
    mps              the contract about MPS: folders, state file, limits
    mpsprofile       how MPS runs on a card, and how a pod wants to use it
    shareagent       the contract with the share agent
    cdiruntimes      which container runtimes take CDI devices
    schedulerconfig  the extender stanzas of kube-scheduler's configuration
    gpunodes         labels of nodes by which others say that they have GPUs, or that their driver is being replaced
    lookalikes       misspelled and foreign resource names
"""

"""The formats of annotations and custom resources: one codec for each format, used by all components.

Input: decoded JSON of pods and of Cardwise's objects. Output: requests, assignments, cards, classes, quotas, as values.

    request          a pod's request of cards and devices. Read this first
    assignment       what the pod got: the annotations of a bound pod
    claims           the same as an allocated ResourceClaim
    names            every name that leaves the process
    cards            a card as placement sees it
    cardlimits       the extender's limits per card, in its ConfigMap
    classes          ResourceClass: a named type of card
    selectors        the label selector of a class
    quotas           GPUQuota: how much a namespace may use, and what each share counts
    policies         placement policies that compare only the free memory of cards
    mps              the MPS contract: folders, state file, limits
    mpsprofile       how MPS runs on a card, and how a pod uses it
    isolation        what enforces a share on a card: tiers for memory and compute
    sharing          with which pods a pod shares its cards
    shareagent       the contract with the share agent
    cdiruntimes      which container runtimes support CDI devices
    schedulerconfig  the extender stanzas of kube-scheduler's configuration
    admissionpolicies  whether admission policies refuse what the chart wants refused
    gpunodes         labels of other projects: nodes with GPUs, and driver upgrades
    lookalikes       misspelled and foreign resource names
"""

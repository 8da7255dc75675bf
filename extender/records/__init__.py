"""Records of pods, nodes, Cardwise's objects and calls of kube-scheduler, decoded from JSON.

Input: JSON of the API server and of kube-scheduler. Output: the fields that decisions need. Records are immutable.

    pod            a pod that is to be placed: its request, its gang, its priority
    podinfo        pods of the watch, most of which have a node: less is kept of them
    podref         namespace, name and UID of a pod
    nodeinfo       what a node has for pods
    feasiblenodes  for `nomination`: the nodes that kube-scheduler would not refuse for a pod by labels and taints. An
                   index of records, which the state keeps up to date
    objects        cards (ExtendedResource), ResourceClasses, GPUQuotas
    shared         one object for all labels that are equal
    wire           kube-scheduler's calls and the responses (ExtenderArgs, ExtenderFilterResult and the others)
"""

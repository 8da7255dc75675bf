"""Records of pods, nodes, Cardwise's objects and calls of kube-scheduler, decoded from JSON.

Input: JSON of the API server and of kube-scheduler. Output: the fields that decisions need. Records are immutable.

    pod            a pod to be placed: its request, its gang, its priority
    podinfo        compact records of the pods of the watch; most of these pods have a node already
    claim          ResourceClaims of Cardwise's class, and pending pods that wait for one
    podref         namespace, name and UID of a pod
    nodeinfo       the resources that a node has for pods
    feasiblenodes  for `nomination`: an index of the nodes whose labels and taints admit a pod
    cards          cards (ExtendedResource)
    shared         one shared object for all equal labels
    wire           kube-scheduler's calls and the responses (ExtenderArgs, ExtenderFilterResult and so on)
"""

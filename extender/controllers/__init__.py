"""Controllers: background work on timeouts, and all writes and evictions outside calls of kube-scheduler.

Input: the state. Output: evictions, nominated nodes, removed gates, and the objects that `reporting` writes.

    loops               the threads; requeues pods by changing an annotation of a node
    gangcontroller      gangs: removes gates, plans waiting gangs, evicts a gang that is bound in part
    nominationwriter    writes nominated nodes into the statuses of pods
    workloadcontroller  lets the engine of the scored policies learn the workload
    evictions           evicts victims for pods that lack only cards: kube-scheduler finds no victims for them
    overcommit          evicts the later pod from an overcommitted card
    directbinds         deletes pods that were bound without the extender
    fragmetrics         metrics of the cards' memory
"""

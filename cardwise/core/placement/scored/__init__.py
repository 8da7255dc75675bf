"""Policies that compare all nodes by how much of them the workload could still use; see docs/design/0008-policies.md.

Input: the ledger's nodes, the pods created so far, a request. Output: the best node and its cards.

Only this package and `defrag.fragmentation` import numpy in the core. It is imported only if such a policy is used, or
to measure fragmentation.

    engine         the placement engine for all policies; the entrance
    scoring        the protocol of a scored policy
    pricing        the policy `priced`; `prices` (of the free remainder of a card), `kindprices` (of scarce models) and
                   `expectedcapacity` (of nodes whose pods end) are its parts
    fragments      how much free memory no expected pod can use
    workload       the frequency of each kind of pod
    shapes         a pod's request as plain numbers
    candidates     where a shape fits, and which cards it could take
    nodetable      all nodes as arrays; `cardtable`: which card serves which shape
    nodefeatures   numbers that policies compute for each node, cached until it changes; `rows`: the same for scores
"""

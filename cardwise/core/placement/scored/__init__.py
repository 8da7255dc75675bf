"""Policies that compare all nodes by what the workload could still use of them; see docs/design/0008-policies.md.

Input: the ledger's nodes, the pods created so far, a request. Output: the best node and its cards.

The only part of the core that imports numpy, with `defrag.fragmentation`. It is imported only if such a policy is used,
or for measuring fragmentation.

    engine         the placement engine for all policies; the entrance
    scoring        the protocol of a scored policy
    pricing        the policy `priced`; `prices` (of rests of a card), `kindprices` (of scarce models) and
                   `expectedcapacity` (of nodes whose pods end) are its parts
    fragments      how much free memory no expected pod can use
    workload       the frequency of each kind of pod
    shapes         a pod's request as plain numbers
    candidates     where a shape fits, and which cards it could take
    nodetable      all nodes as arrays; `cardtable`: which card serves which shape
    nodefeatures   what policies compute of nodes, kept until a node changes; `rows`: the same for scores
"""

"""Scored policies: compare nodes by the capacity that stays usable for the workload (docs/design/0008-policies.md).

Input: the ledger's nodes, the pods created so far, a request. Output: the best node and its cards.

In `core`, only this package and `defrag.fragmentation` import numpy. They are imported only if a scored policy is used
or fragmentation is measured.

    engine         the placement engine for all policies. Read this first
    scoring        the protocol of a scored policy
    pricing        the policy `priced`; `prices` (of the free remainder of a card), `kindprices` (of scarce models) and
                   `expectedcapacity` (of nodes whose pods end) are its parts
    fragments      how much free memory no expected pod can use
    workload       the frequency of each kind of pod
    shapes         a pod's request as plain numbers
    candidates     where a shape fits, and which cards it could take
    nodetable      all nodes as arrays; `cardarrays`: which card serves which shape
    nodefeatures   numbers that policies compute for each node, cached until the node changes
    rows           scores of nodes for each shape, cached until the node changes
"""

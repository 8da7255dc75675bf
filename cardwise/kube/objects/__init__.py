"""One record for each kind of object: the fields that Cardwise reads, decoded in one place, and the functions on them.

Input: JSON of the API server. Output: records. They follow the API; the types of the domain are in `cardwise.core`.

Fields that Cardwise does not read are skipped. Records are immutable and have no circular references, so the garbage
collector does not track them. A component that keeps tens of thousands of objects keeps a projection of its own.

    meta                 metadata of all objects
    extendedresources    cards and other devices, with their whole status
    resourceclasses      ResourceClasses; `gpuquotas`: GPUQuotas; `unreadable`: in place of one that cannot be read
    nodes                nodes; `namespaces`: namespaces
    pods                 the users and states of containers, how a pod uses MPS
"""

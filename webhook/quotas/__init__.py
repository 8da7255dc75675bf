"""Objects that limit and name: ResourceQuotas and LimitRanges, GPUQuotas, ResourceClasses.

Comes in: one of these as its author wrote it, or a pod that they count. Goes out: the object rewritten, or
`InvalidRequest`.

`quotas` rewrites Kubernetes' own as pods are rewritten; `gpuquotas` checks pods against GPUQuotas early, and checks a
GPUQuota itself; `resourceclasses` checks a ResourceClass.
"""

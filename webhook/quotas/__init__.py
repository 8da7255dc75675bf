"""Objects that limit and name: ResourceQuotas and LimitRanges, GPUQuotas, ResourceClasses.

`quotas` rewrites Kubernetes' own as pods are rewritten; `gpuquotas` checks pods against GPUQuotas early, and checks a
GPUQuota itself; `resourceclasses` checks a ResourceClass.
"""

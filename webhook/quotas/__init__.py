"""Objects that limit and name: ResourceQuotas and LimitRanges, GPUQuotas, ResourceClasses.

`quotas` rewrites Kubernetes' own as pods are rewritten; `gpuquotas` answers pods early and judges a quota;
`resourceclasses` judges a class.
"""

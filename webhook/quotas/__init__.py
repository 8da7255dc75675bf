"""Admission of ResourceQuotas, LimitRanges, GPUQuotas and ResourceClasses.

Input: one of these objects as its author wrote it, or a pod that they count. Output: the rewritten object, or
`InvalidRequest`.

`quotas` rewrites Kubernetes' own objects in the same way as pods; `gpuquotas` checks pods against GPUQuotas early, and
checks GPUQuotas; `resourceclasses` checks ResourceClasses.
"""

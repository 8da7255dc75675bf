"""Admission of ResourceQuotas, LimitRanges, GPUQuotas and ResourceClasses.

Input: one of these objects, as written by its author. Output: the rewritten object, or `InvalidRequest`.

`quotas` rewrites Kubernetes' own objects in the same way as pods; `gpuquotas` checks
GPUQuotas; `resourceclasses` checks ResourceClasses.
"""

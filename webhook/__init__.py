"""The admission webhook: rewrites pods and templates into the form that the other components read, and refuses invalid
ones.

Input: AdmissionReviews of the API server, and watch events. Output: JSON Patches, refusals, warnings. Read first:
`server.decisions`.

The packages, in the order of imports (each imports only from packages after it): `server` (HTTP, reviews, decisions),
`quotas` (quotas and classes), `pods` (rules for pods), `templates` (bare names in workloads, spellings of names),
`cluster` (the view of the cluster), `metrics`.
"""

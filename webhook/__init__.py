"""The admission webhook: rewrites pods and templates into the form that the other components read, and refuses invalid
ones.

Input: AdmissionReviews of the API server, and watch events. Output: JSON Patches, refusals, warnings. Read first:
`rules` (all that can happen to a pod), then `server.decisions`.

The packages, in the order of imports (each imports only from packages after it): `server` (HTTP, reviews, decisions),
`rules` (the rules for pods, in order), `quotas` (quotas and classes), `pods` (the modules of the rules), `templates`
(bare names in workloads, spellings of names), `cluster` (the view of the cluster), `metrics`,
`deadline`.
"""

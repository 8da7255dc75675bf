"""The admission webhook: rewrites pods and templates into what the other parts understand, and refuses in words.

Comes in: AdmissionReviews of the API server, and what watches see. Goes out: JSON Patches, refusals, warnings. Read
first: `server.decisions`.

The rooms, none of which imports from one above it: `server` (HTTP, reviews, decisions), `cluster` (what is known
beside the review), `quotas` (quotas and classes), `pods` (what a pod gets, and what it may not be), `templates` (bare
names in workloads; the spellings of names), `metrics`.
"""

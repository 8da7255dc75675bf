"""The webhook's server: answers the API server's admission reviews.

Comes in: an AdmissionReview, as bytes. Goes out: a decision, with a JSON Patch or a refusal, and warnings.

Read first: `decisions` (one function a path: what is asked in which order), then `app` (HTTP), `review`, `patches`;
`advice` warns of what would wait for ever; `sizes` limits how large an object may be.
"""

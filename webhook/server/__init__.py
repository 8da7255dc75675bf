"""The webhook's server: an AdmissionReview comes in as bytes, a decision with a JSON Patch goes out.

Read first: `decisions` (one function a path: what is asked in which order), then `app` (HTTP), `review`, `patches`;
`advice` warns of what would wait for ever; `sizes` limits how large an object may be.
"""

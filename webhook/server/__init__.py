"""From bytes to bytes: an AdmissionReview comes in, a decision with a JSON Patch goes out.

Read first: `decisions` (one function a path: what is asked in which order), then `app` (HTTP), `review`, `patches`;
`advice` warns of what would wait for ever.
"""

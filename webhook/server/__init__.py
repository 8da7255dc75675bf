"""The webhook's server: answers the API server's admission reviews.

Input: an AdmissionReview, as bytes. Output: a decision, with a JSON Patch or a refusal, and warnings.

Read first: `decisions` (one function per path, with the order of the rules), then `app` (HTTP), `review`, `patches`;
`advice` warns about objects that would have no effect; `sizes` limits the size of objects; `reapplied` restores the
stored spellings of a pod that is applied again.
"""

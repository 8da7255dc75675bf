"""Basic values: quantities, texts for people, and the error for bad input.

Comes in: a text or a number of JSON. Goes out: MiB and percent, `InvalidRequest` with field and remedy, `Refusal`.

Read first: `quantity` (Kubernetes' own), then `amounts` (ours), `refusals` (why a node takes no pod).
"""

"""What everything else is written in: quantities, texts, and the error for what a user wrote.

Comes in: a text or a number of JSON. Goes out: MiB and percent, `InvalidRequest` with field and remedy, `Refusal`.

Read first: `quantity` (Kubernetes' own), then `amounts` (ours), `refusals` (why a node takes no pod).
"""

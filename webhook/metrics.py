"""What the webhook counts."""

from prometheus_client import Counter, Histogram

REVIEWS = Counter(
    "cardwise_webhook_reviews_total",
    "AdmissionReviews answered, by path and outcome (allowed, patched, refused, malformed, failed).",
    ["path", "outcome"],
)
SECONDS = Histogram(
    "cardwise_webhook_review_seconds",
    "Time to decide on an AdmissionReview, without TLS and the network.",
    ["path"],
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
)

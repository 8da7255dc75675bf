"""`make demo`: plain pods share simulated cards on a real Kubernetes, watched live."""

"""Data parallelism with replicated parameters: gradients are averaged in buckets during backward."""

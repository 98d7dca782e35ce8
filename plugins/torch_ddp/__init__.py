"""Data parallelism with torch's DistributedDataParallel."""

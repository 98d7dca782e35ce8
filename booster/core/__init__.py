"""Shared engine of the wrappers: models, optimizers, accumulation and shards."""

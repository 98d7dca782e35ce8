"""Stages of a model that work on micro-batches one after the other."""

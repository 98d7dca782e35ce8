"""Stages of a model that work on microbatches one after the other."""

"""Optimizer states in files: read ahead of the step, written behind it."""

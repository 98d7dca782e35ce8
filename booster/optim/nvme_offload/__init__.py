"""Optimizer states in files on NVMe: read ahead of the step, written behind it."""

"""Saving: from tensor slices in memory to files, on all ranks."""

"""Micro-benchmark of `booster benchmark`: one MLP under all parallel configurations for a number of ranks."""

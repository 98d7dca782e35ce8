"""The micro-benchmark of `booster benchmark`: one MLP under every way to divide it that a number of ranks allows."""

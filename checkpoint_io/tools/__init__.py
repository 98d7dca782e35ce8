"""Inspection and conversion of checkpoints in a single process, for `booster ckpt`."""

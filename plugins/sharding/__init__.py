"""Shared parts of the strategies that shard parameters or optimizer states."""

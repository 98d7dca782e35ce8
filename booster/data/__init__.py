"""Data loading: equal shares for all ranks, a new order in every epoch, exact positions to save and restore."""

from .dataloader import DistributedDataLoader, DistributedStreamLoader
from .prepare import check_can_shard, prepare_dataloader, shard_dataloader
from .sampler import DistributedBatchSampler

__all__ = [
    "DistributedBatchSampler",
    "DistributedDataLoader",
    "DistributedStreamLoader",
    "check_can_shard",
    "prepare_dataloader",
    "shard_dataloader",
]

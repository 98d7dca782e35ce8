"""Data loading: equal parts for all ranks, a new order in every epoch, exact positions to save and restore."""

from booster.data.active import active_loader
from booster.data.dataloader import DistributedDataLoader
from booster.data.prepare import check_can_shard, prepare_dataloader, shard_dataloader
from booster.data.sampler import DistributedBatchSampler

__all__ = [
    "DistributedBatchSampler",
    "DistributedDataLoader",
    "active_loader",
    "check_can_shard",
    "prepare_dataloader",
    "shard_dataloader",
]

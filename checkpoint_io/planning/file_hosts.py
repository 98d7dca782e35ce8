"""Assignment of files to hosts, and of a shard's replicas to writers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["assign_hosts", "assign_writers", "usable_replicas"]

# On a shared file system (NFS), two hosts that write into one file may overwrite each other's pages. So each file is
# assigned to one host. Shards that no rank of the host holds are relayed: the owner sends them to a writer rank there.


def assign_hosts(
    file_of_shard: np.ndarray,
    bytes_of_shard: np.ndarray,
    replicas: np.ndarray,
    replica_sets: Sequence[np.ndarray],
    num_files: int,
    host_of_rank: np.ndarray,
) -> np.ndarray:
    """Assign each file to the host that holds most of its bytes, among hosts below their fair share of bytes.

    Args:
        file_of_shard: File index of each shard.
        bytes_of_shard: Size of each shard.
        replicas: Index into `replica_sets` for each shard.
        replica_sets: Ranks that hold replicas of a shard.
        num_files: Number of files.
        host_of_rank: Host index of each rank.
    """
    num_ranks = np.bincount(host_of_rank)
    sizes = np.bincount(file_of_shard, weights=bytes_of_shard, minlength=num_files)
    bytes_per_host = _bytes_per_host(file_of_shard, bytes_of_shard, replicas, replica_sets, num_files, host_of_rank)
    fair = sizes.sum() * num_ranks / len(host_of_rank)
    loads = np.zeros(len(num_ranks))
    chosen = np.zeros(num_files, dtype=np.int64)
    for file in np.argsort(-sizes, kind="stable").tolist():
        is_open = (num_ranks > 0) & ((loads < fair) | (sizes[file] == 0))
        # Most bytes held first, then least load; a host index without ranks is never chosen.
        chosen[file] = np.lexsort((loads, -bytes_per_host[file], ~is_open))[0]
        loads[chosen[file]] += sizes[file]
    return chosen


def _bytes_per_host(
    file_of_shard: np.ndarray,
    bytes_of_shard: np.ndarray,
    replicas: np.ndarray,
    replica_sets: Sequence[np.ndarray],
    num_files: int,
    host_of_rank: np.ndarray,
) -> np.ndarray:
    """Return bytes per file and host that at least one rank of the host holds."""
    num_hosts = int(host_of_rank.max()) + 1
    pairs, pair_of = np.unique(file_of_shard * max(len(replica_sets), 1) + replicas, return_inverse=True)
    sizes = np.bincount(pair_of, weights=bytes_of_shard)
    bytes_per_host = np.zeros((num_files, num_hosts))
    for pair, size in zip(pairs.tolist(), sizes.tolist(), strict=True):
        file, number = divmod(pair, len(replica_sets))
        bytes_per_host[file, np.unique(host_of_rank[replica_sets[number]])] += size
    return bytes_per_host


def usable_replicas(
    host_of_shard: np.ndarray, replicas: np.ndarray, replica_sets: Sequence[np.ndarray], host_of_rank: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Restrict replicas to the host of the shard's file, if it has any; return an index per shard and the sets.

    Args:
        host_of_shard: Host of each shard's file.
        replicas: Index into `replica_sets` for each shard.
        replica_sets: Ranks that hold replicas of a shard.
        host_of_rank: Host index of each rank.
    """
    num_hosts = int(host_of_rank.max()) + 1
    pairs, pair_of = np.unique(replicas * num_hosts + host_of_shard, return_inverse=True)
    numbers: dict[bytes, int] = {}
    sets: list[np.ndarray] = []
    number_of_pair = np.empty(len(pairs), dtype=np.int64)
    for index, pair in enumerate(pairs.tolist()):
        number, host = divmod(pair, num_hosts)
        ranks = replica_sets[number]
        local = ranks[host_of_rank[ranks] == host]
        usable = local if len(local) else ranks
        number_of_pair[index] = numbers.setdefault(usable.tobytes(), len(sets))
        if len(numbers) > len(sets):
            sets.append(usable)
    return number_of_pair[pair_of], sets


def assign_writers(owner: np.ndarray, host: np.ndarray, host_of_rank: np.ndarray) -> np.ndarray:
    """Return the rank that writes each range: its owner, or a substitute on the file's host.

    Args:
        owner: Rank that holds each range in memory.
        host: Host of each range's file.
        host_of_rank: Host index of each rank.
    """
    order = np.argsort(host_of_rank, kind="stable")
    num_ranks = np.bincount(host_of_rank)
    first = np.cumsum(num_ranks) - num_ranks
    substitute = order[first[host] + owner % num_ranks[host]]
    return np.where(host_of_rank[owner] == host, owner, substitute)

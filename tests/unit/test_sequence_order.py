"""Which tokens, heads and arguments go to which rank: numbers alone."""

from __future__ import annotations

import pytest
import torch

from booster.plugins.hybrid_parallel.sequence_parallel.group import SequenceSharding
from booster.plugins.hybrid_parallel.sequence_parallel.splitters import token_dim
from booster.plugins.hybrid_parallel.sequence_parallel.ulysses import head_ranges


@pytest.mark.parametrize("is_zigzag", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 64])
def test_every_token_is_on_one_rank_and_comes_back(num_ranks, is_zigzag):
    for length in (0, 1, 2, 5, 8, 13, 127, 128, 129):
        order = SequenceSharding(length, num_ranks, is_zigzag)
        whole = torch.arange(2 * length).view(2, length)
        parts = [order.shard(whole, 1, rank) for rank in range(num_ranks)]
        assert [part.shape[1] for part in parts] == order.local_lengths()
        assert torch.equal(order.unshard(parts, 1), whole)
        assert max(order.local_lengths()) - min(order.local_lengths()) <= 1 + is_zigzag


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_zigzag_gives_every_rank_as_much_to_look_at(num_ranks):
    order = SequenceSharding(16 * num_ranks, num_ranks, is_zigzag=True)
    seen = [
        sum(token + 1 for start, stop in order.chunks(rank) for token in range(start, stop))
        for rank in range(num_ranks)
    ]
    assert len(set(seen)) == 1


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_every_query_head_is_on_one_rank_with_its_key_head(num_ranks):
    for num_heads, num_key_heads in [(8, 8), (8, 2), (6, 3), (5, 1), (2, 2), (1, 1), (12, 4), (7, 7)]:
        shares = head_ranges(num_heads, num_key_heads, num_ranks)
        assert [head for share in shares for head in range(share.start, share.stop)] == list(range(num_heads))
        per_group = num_heads // num_key_heads
        for share in shares:
            groups = {head // per_group for head in range(share.start, share.stop)}
            assert sorted(groups) == list(range(share.key_start, share.key_stop))
    assert head_ranges(8, 4, 2)[1].key_start == 2


@pytest.mark.parametrize(
    ("name", "tensor", "dim"),
    [
        ("position_embeddings", torch.zeros(1, 6, 4), 1),
        ("position_embeddings", torch.zeros(1, 6, 6), 1),
        ("position_ids", torch.zeros(2, 6, dtype=torch.long), 1),
        ("cache_position", torch.zeros(6, dtype=torch.long), 0),
        ("position_ids", torch.zeros(3, 2, 6, dtype=torch.long), 2),
        ("freqs_cis", torch.zeros(6, 4, dtype=torch.complex64), 0),
        ("table", torch.zeros(2, 6, 1, 4), 1),
        ("table", torch.zeros(6, 1, 4), 0),
        ("attention_mask", torch.zeros(2, 1, 6, 6), None),
        ("attention_mask", torch.zeros(2, 6), None),
        ("more", torch.zeros(2, 1, 6, 6), None),
        ("more", torch.zeros(2, 6, dtype=torch.bool), None),
        ("encoder_hidden_states", torch.zeros(2, 6, 4), None),
        ("position_bias", torch.zeros(1, 4, 6, 6), None),
        ("cu_seq_lens_q", torch.zeros(6, dtype=torch.int32), None),
        ("residual", torch.zeros(2, 6, 4), 1),
        ("scale", torch.zeros(()), None),
    ],
)
def test_arguments_go_along_the_sequence_or_stay_whole(name, tensor, dim):
    assert token_dim(name, tensor, 6) == dim

"""Output head and cross-entropy of a rank's own tokens.

Behind a stack all ranks of a sequence-parallel group have the hidden states of all tokens. If each computed the head of
all of them, the largest matrix product of a language model and its logits would be repeated on every rank. So the head
returns `TokenParallelLogits`. Their cross-entropy computes the logits and losses of one share of the tokens per rank
and gathers the losses, one number per token; backward gathers the gradients of the hidden states. Gradients are scaled
as in a stack, see `splitters`. Any other use computes the logits of all tokens on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from booster.core.compiling import not_compiled
from booster.core.deferred_logits import DeferredHead, DeferredLogits, cross_entropy_of_rows
from booster.core.layer_stacks import subclass_of
from booster.core.partial_logits import check_classes
from booster.interface import ShardSpec

from .group import SequenceParallelGroup
from .layer_context import current_layer
from .splitters import SequenceAxisSplitter

_ATTRIBUTE = "_token_parallel"


def share_head(
    model: nn.Module, sp_group: SequenceParallelGroup, shard_specs: Mapping[str, Sequence[ShardSpec]]
) -> None:
    """Make the output head of a language model return `TokenParallelLogits`, in place.

    Args:
        model: The user's model, or a stage's part of it; the head is its `get_output_embeddings()`, if it has one.
        sp_group: The sequence-parallel group.
        shard_specs: Shard specs of each parameter of the model by name.

    Collective: no; the cross-entropy of the logits is.
    """
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    weight = head._parameters.get("weight") if isinstance(head, nn.Module) else None
    if head is None or weight is None or weight.dim() != 2:
        return  # no head, or not on this stage
    name = next(name for name, parameter in model.named_parameters() if parameter is weight)
    num_classes = shard_specs[name][0].logical_shape[0]
    head.__class__ = subclass_of(type(head), "token_parallel", mixin=_TokenParallelHead)
    head.__dict__[_ATTRIBUTE] = sp_group, num_classes


class _TokenParallelHead(nn.Module):
    """Mixin of heads. Overrides `__call__` and not `forward`, so that hooks run where the logits are computed."""

    @not_compiled
    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        compute = super().__call__
        if args or kwargs or hidden.dim() < 2 or current_layer() is not None:
            return compute(hidden, *args, **kwargs)
        sp_group, num_classes = self.__dict__[_ATTRIBUTE]
        head = _Head.of(self, compute, num_classes, sp_group=sp_group)
        return TokenParallelLogits.of(hidden, head)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Head(DeferredHead):
    """The head, and the ranks that share its tokens."""

    sp_group: SequenceParallelGroup


class TokenParallelLogits(DeferredLogits):
    """Logits whose cross-entropy is computed of one share of the tokens per rank. Created by `of`."""

    _unsupported = (
        "on logits whose cross-entropy each rank computes of its own tokens would change none of them: call it on"
        " `logits.full_tensor()`, or give parallel_output=False to the plugin"
    )
    _instead = "give parallel_output=False to the plugin"
    head: _Head

    def losses_of(self, hidden: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the loss of each row. Collective: in forward and backward."""
        sp_group, splitter = self.head.sp_group, SequenceAxisSplitter(self.head.sp_group)
        check_classes(target, self.head.num_classes, options["ignore_index"])
        own = splitter.scatter(hidden, 0)
        own_target = sp_group.sharding_of(len(target)).shard(target, 0, sp_group.rank)
        losses = cross_entropy_of_rows(self.head, own, own_target, **options)
        return splitter.gather(losses, 0, len(target))

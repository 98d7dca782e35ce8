"""What the dispatcher's operators do, as far as recording needs to know it."""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "draw_like",
    "draws_alike",
    "is_predictable",
    "is_random",
    "is_view",
    "keeps_values_unread",
    "leaves_a_mark",
    "written_arguments",
]

_aten = torch.ops.aten

# Results whose sizes and strides the meta kernels tell without running the operator.
_PREDICTABLE = frozenset(
    {
        *(_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided),
        *(_aten.zeros, _aten.zeros_like, _aten.new_zeros, _aten.ones, _aten.ones_like, _aten.new_ones),
        *(_aten.full, _aten.full_like, _aten.new_full, _aten.clone, _aten._to_copy),
        *(_aten.tril, _aten.triu, _aten.cat, _aten.stack),
    }
)
# Random factories, and the writer that draws the same numbers. (Results of those themselves would come from malloc, and
# what is freed there is lost between the small tensors of the model that lie around it.)
_DRAW_LIKE = {
    _aten.randn: _aten.normal_.default,
    _aten.randn_like: _aten.normal_.default,
    _aten.rand: _aten.uniform_.default,
    _aten.rand_like: _aten.uniform_.default,
}
# Writers whose draws depend on the shape alone: what the tensor held before is not needed to advance the generator.
_DRAWS_ALIKE = frozenset(
    {
        *(_aten.normal_, _aten.uniform_, _aten.exponential_, _aten.geometric_, _aten.cauchy_, _aten.log_normal_),
        *(_aten.random_, _aten.bernoulli_),
    }
)
# They change which storage a tensor has, not what is in one.
_REWIRE = frozenset(
    {
        *(_aten.set_, _aten.detach_, _aten.squeeze_, _aten.unsqueeze_, _aten.transpose_, _aten.t_),
        *(_aten.as_strided_, _aten.swapaxes_, _aten.swapdims_),
    }
)
# Views with a bit that says how to read the values, which sizes and strides do not tell.
_MARKS = frozenset({_aten._conj, _aten._neg_view})


def is_random(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags


def draws_alike(operator: Any) -> bool:
    """Returns whether a random writer draws the same numbers whatever its tensors hold."""
    return operator.overloadpacket in _DRAWS_ALIKE


def is_predictable(operator: Any) -> bool:
    """Returns whether meta tensors tell the geometry of the result."""
    if is_random(operator):
        return operator.overloadpacket in _DRAW_LIKE
    return operator.overloadpacket in _PREDICTABLE or torch.Tag.pointwise in operator.tags


def draw_like(operator: Any) -> Any:
    """Returns the operator that, on a tensor of its result's shape, draws what a predictable random factory draws."""
    return _DRAW_LIKE[operator.overloadpacket]


def is_view(operator: Any) -> bool:
    """Returns whether all that an operator does is to return other views of its argument's storage."""
    results = operator._schema.returns
    return not written_arguments(operator) and any(result.alias_info is not None for result in results)


def keeps_values_unread(operator: Any) -> bool:
    """Returns whether an operator neither reads nor writes what is in a storage."""
    return is_view(operator) or operator.overloadpacket in _REWIRE


def leaves_a_mark(operator: Any) -> bool:
    """Returns whether the result is a view whose values are read in another way."""
    return operator.overloadpacket in _MARKS


def written_arguments(operator: Any) -> list[str]:
    """Returns the names of the arguments that an operator writes to."""
    arguments = operator._schema.arguments
    return [argument.name for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write]

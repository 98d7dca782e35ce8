"""Finds the stacks of a model: its layers that are alike and run one after the other."""

from __future__ import annotations

from torch import nn

__all__ = ["find_stacks", "stack_layer_of"]


def find_stacks(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Returns the names of the layers of every stack, in order.

    A stack is a list (`nn.ModuleList`, or an `nn.Sequential` of two or more) of modules of one class that consist of
    further modules with parameters, and that is in no other stack. Experts in a list are none: they run side by side.
    """
    found: list[tuple[str, ...]] = []
    _collect(model, "", found)
    return tuple(found)


def stack_layer_of(name: str, stacks: tuple[tuple[str, ...], ...]) -> str | None:
    """Returns the name of the layer of a stack that a module is, or is in; None: it is outside of all stacks."""
    for stack in stacks:
        for layer in stack:
            if name == layer or name.startswith(f"{layer}."):
                return layer
    return None


def _collect(module: nn.Module, name: str, found: list[tuple[str, ...]]) -> None:
    if _is_stack(module, name):
        found.append(tuple(f"{name}.{key}" if name else key for key, _ in module.named_children()))
        return
    for key, child in module.named_children():
        _collect(child, f"{name}.{key}" if name else key, found)


def _is_stack(module: nn.Module, name: str) -> bool:
    layers = list(module.children())
    if not layers or "expert" in name.rpartition(".")[2]:
        return False
    if not isinstance(module, nn.ModuleList) and not (isinstance(module, nn.Sequential) and len(layers) > 1):
        return False
    return len({type(layer) for layer in layers}) == 1 and all(_is_layer(layer) for layer in layers)


def _is_layer(module: nn.Module) -> bool:
    """True for a module with a forward of its own whose parameters are those of at least two modules in it."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return False
    holders = [
        one for one in module.modules() if one is not module and any(True for _ in one.parameters(recurse=False))
    ]
    return len(holders) > 1

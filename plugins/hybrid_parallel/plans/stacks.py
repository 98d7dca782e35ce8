"""Find the stacks of a model: lists of equal layers that run consecutively."""

from __future__ import annotations

from torch import nn

__all__ = ["find_stacks", "stack_layer_of"]


def find_stacks(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names of the layers of every stack, in order.

    A stack is a list (`nn.ModuleList`, or an `nn.Sequential` of two or more) of modules of one class that contain
    further modules with parameters. Stacks are not nested. A list of experts is not a stack: experts run in parallel.
    """
    found: list[tuple[str, ...]] = []
    _collect(model, "", found)
    return tuple(found)


def stack_layer_of(name: str, stacks: tuple[tuple[str, ...], ...]) -> str | None:
    """Return the name of the stack's layer that is or contains a module, or None outside of all stacks."""
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
    """Whether a module has its own forward and at least two descendants with parameters."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return False
    holders = [
        one for one in module.modules() if one is not module and any(True for _ in one.parameters(recurse=False))
    ]
    return len(holders) > 1

"""Point-to-point communication of activations and their gradients between stages.

Note [Cached shapes]
The first activation of a kind is sent with a header that describes its tree, later ones without. The kind is the
receiving position, the signature of the microbatch, and whether gradients will return. Both ends process the same
batches, so both know which kinds are cached. Gradients return for the tensors that required them, in their shapes, and
never need a header.

Note [Send completion]
Gloo does not report the completion of a send without waiting for it. But a message from the receiver implies it: all
that the receiver took before it sent that message has arrived, and the schedule determines what that was.

Note [Ordered links]
Operations of an accelerator's communicator run one after the other, in the order of their calls: a receive that is
posted too early blocks the sends behind it, and stages can wait for each other in a ring. A communicator per pair of
stages and direction would avoid most of that, but each costs device memory. So there are two for the whole pipeline,
for messages to later and to earlier stages. The first one is that of the pp axis, whose collectives run between the
batches. Each stage starts its operations in the order of a simulated step: no message depends on a later one in it, so
of those that are not through yet the first one can always run.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

from booster.comm import RecvChannel, SendChannel, TensorMeta
from booster.errors import ConfigError

from .schedules import Message, StageAction, action_list, check_orders, incoming_messages, message_order
from .stage_forward import StagePartition

# Note [Tree specs]
# A spec is nested tuples whose first entry is the kind. A container has the name of its class (None for the built-in
# one), which the receiving rank looks up among its imported modules, as it runs the same model. Nothing of a message is
# executed except the construction of tuples, lists, dicts and dataclass instances. Values carry their type, as
# 1 == True, and floats are hexadecimal, as nan != nan. So equal specs mean equal trees, and equal bytes.
# Dataclass instances are created without their constructors, with all their attributes, because the arguments of a
# constructor may differ from the fields. transformers' ModelOutput is a dict and a dataclass.
_Node = tuple[Any, ...]

_CONTAINERS: Mapping[str, type] = {"tuple": tuple, "list": list, "dict": dict}


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """Metadata of a tensor in a tree.

    Attributes:
        shape: Shape.
        dtype: Dtype.
        requires_grad: Whether its gradient is sent back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class TreeSpec:
    """Structure of a tree without its tensors' data; see Note [Tree specs].

    Attributes:
        root: Nested tuples.
        tensors: Metadata of the tree's tensors, each once, in the order of `flatten`.
    """

    root: _Node
    tensors: tuple[TensorLeaf, ...]

    @cached_property
    def specs(self) -> tuple[TensorMeta, ...]:
        """Shapes and dtypes of the tensors."""
        return tuple(TensorMeta(tensor.shape, tensor.dtype) for tensor in self.tensors)

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the tree with these tensors, as many as `self.tensors`."""
        if len(tensors) != len(self.tensors):
            raise ValueError(f"a tree of {len(self.tensors)} tensors can't be built from {len(tensors)}")
        return _build(self.root, tensors)

    def encode(self) -> bytes:
        """Return the spec as JSON, equal for equal specs."""
        tensors = [[str(one.dtype).removeprefix("torch."), one.shape, one.requires_grad] for one in self.tensors]
        return json.dumps([self.root, tensors], separators=(",", ":")).encode()

    @staticmethod
    def decode(content: bytes) -> TreeSpec:
        """Return the spec encoded by `encode`, possibly in another process.

        Raises:
            ConfigError: The content is invalid, or names a class that this process has not imported, or that is not a
                dataclass, tuple, list or dict.
        """
        try:
            root, tensors = json.loads(content)
            forms = tuple(TensorLeaf(tuple(shape), _dtype(name), bool(grad)) for name, shape, grad in tensors)
            return TreeSpec(_checked(root, len(forms)), forms)
        except ConfigError:
            raise
        except (ValueError, TypeError, IndexError, AttributeError) as error:
            raise ConfigError(
                f"{bytes(content[:80])!r} does not describe a tree of tensors, as a message between pipeline stages has"
                " to: run the same program and the same version of the library on all ranks"
            ) from error


def flatten(tree: Any) -> tuple[list[torch.Tensor], TreeSpec]:
    """Flatten a tree.

    Args:
        tree: Dense tensor, None, bool, int, float or str, or any tuple, list, dict, namedtuple or dataclass instance of
            these, nested to any depth.

    Returns:
        The distinct tensors, and the spec that rebuilds the tree from them.

    Raises:
        ConfigError: The tree has a value of another type; the message has its path.
    """
    walk = _Flattener()
    root = walk.node(tree, "")
    leaves = tuple(TensorLeaf(tuple(one.shape), one.dtype, one.requires_grad) for one in walk.tensors)
    return walk.tensors, TreeSpec(root, leaves)


class _Flattener:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._index_of: dict[int, int] = {}

    def node(self, value: Any, path: str) -> _Node:
        """Return the node of a value at a path such as `[0].logits`."""
        if isinstance(value, torch.Tensor):
            return ("tensor", self._tensor_index(value, path))
        simple = _simple_node(value)
        if simple is not None:
            return simple
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
            names += [name for name in getattr(value, "__dict__", ()) if name not in names]
            attributes = tuple((name, self.node(getattr(value, name), f"{path}.{name}")) for name in names)
            items = self._items(value, path) if isinstance(value, dict) else ()
            return ("dataclass", _class_name(value, None, path), attributes, items)
        if isinstance(value, dict):
            return ("dict", _class_name(value, dict, path), self._items(value, path))
        for kind in (tuple, list):
            if isinstance(value, kind):
                children = tuple(self.node(child, f"{path}[{index}]") for index, child in enumerate(value))
                return (kind.__name__, _class_name(value, kind, path), children)
        raise ConfigError(
            f"{_what(value, path)}, which can't travel between pipeline stages: only tensors, None, bool, int, float,"
            " str and tuples, lists, dicts, namedtuples and dataclasses of these do. Return these from the layer (for a"
            " cache of keys and values: call the model with use_cache=False), or end the stage behind another layer"
        )

    def _tensor_index(self, tensor: torch.Tensor, path: str) -> int:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ConfigError(
                f"{_what(tensor, path)} of layout {tensor.layout} and dtype {tensor.dtype}, which can't travel between"
                " pipeline stages: return a dense tensor from the layer, or end the stage behind another layer"
            )
        if id(tensor) not in self._index_of:
            self._index_of[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._index_of[id(tensor)]

    def _items(self, value: Mapping[Any, Any], path: str) -> tuple[_Node, ...]:
        items = []
        for key, child in value.items():
            key_node = _simple_node(key)
            if key_node is None:
                raise ConfigError(
                    f"{_what(value, path)} with a key of type {type(key).__name__}, which can't travel between pipeline"
                    " stages: use str, int, bool, float or None as keys"
                )
            items.append((key_node, self.node(child, f"{path}[{key!r}]")))
        return tuple(items)


def _simple_node(value: Any) -> _Node | None:
    # By exact type: an enum may be an int, and numpy's float64 is a float.
    if value is None:
        return ("none",)
    if type(value) in (bool, int, str):
        return (type(value).__name__, value)
    return ("float", value.hex()) if type(value) is float else None


def _build(node: _Node, tensors: Sequence[torch.Tensor]) -> Any:
    kind = node[0]
    if kind == "tensor":
        return tensors[node[1]]
    if kind == "float":
        return float.fromhex(node[1])
    if kind in ("none", "bool", "int", "str"):
        return node[1] if len(node) > 1 else None
    cls = _class_of(node)
    if kind in ("tuple", "list"):
        children = [_build(child, tensors) for child in node[2]]
        make = getattr(cls, "_make", None)  # a namedtuple's constructor takes separate arguments
        return cls(children) if make is None else make(children)
    made = cls.__new__(cls)
    items = node[2] if kind == "dict" else node[3]
    for key, child in items:
        made[_build(key, tensors)] = _build(child, tensors)
    if kind == "dataclass":
        for name, child in node[2]:
            object.__setattr__(made, name, _build(child, tensors))  # frozen dataclasses raise in setattr
    return made


def _checked(node: Any, num_tensors: int) -> _Node:
    """Return the validated node of decoded JSON."""
    kind, *rest = node
    if kind == "tensor" and rest[0] in range(num_tensors):
        return ("tensor", int(rest[0]))
    if kind == "none" and not rest:
        return ("none",)
    if kind in ("bool", "int", "str") and type(rest[0]).__name__ == kind:
        return (kind, rest[0])
    if kind == "float":
        float.fromhex(rest[0])
        return ("float", rest[0])
    if kind in ("tuple", "list"):
        checked: _Node = (kind, rest[0], tuple(_checked(child, num_tensors) for child in rest[1]))
    elif kind == "dict":
        checked = (kind, rest[0], _checked_items(rest[1], num_tensors))
    elif kind == "dataclass":
        attributes = tuple((str(name), _checked(child, num_tensors)) for name, child in rest[1])
        checked = (kind, rest[0], attributes, _checked_items(rest[2], num_tensors))
    else:
        raise ValueError(kind)
    _class_of(checked)  # raises for an unknown class
    return checked


def _checked_items(items: Any, num_tensors: int) -> tuple[_Node, ...]:
    return tuple((_checked(key, num_tensors), _checked(child, num_tensors)) for key, child in items)


def _class_of(node: _Node) -> Any:
    kind, name = node[:2]
    if name is None and kind in _CONTAINERS:
        return _CONTAINERS[kind]
    found = _look_up(name)
    if not isinstance(found, type):
        raise ConfigError(
            f"a message from another pipeline stage holds a {name}, which this process has not imported"
            f" ({'no such name' if found is None else f'it found {found!r}'}): import it at the top of the program, on"
            " all ranks"
        )
    if not (issubclass(found, _CONTAINERS[kind]) if kind in _CONTAINERS else dataclasses.is_dataclass(found)):
        raise ConfigError(
            f"a message from another pipeline stage says that {name} is a {kind}, but here it is not ({found!r}):"
            " run the same program on all ranks"
        )
    return found


def _look_up(name: str) -> Any:
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    return found


def _class_name(value: Any, plain: type | None, path: str) -> str | None:
    cls = type(value)
    if cls is plain:
        return None
    name = f"{cls.__module__}:{cls.__qualname__}"
    if _look_up(name) is not cls:
        raise ConfigError(
            f"{_what(value, path)}, which can't travel between pipeline stages, as another process does not find its"
            f" class by the name {name}: define the class at the top of a module"
        )
    return name


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(name)
    return dtype


def _what(value: Any, path: str) -> str:
    place = f" (at {path} of its output)" if path else ""
    return f"a layer returned a {type(value).__module__}.{type(value).__qualname__}{place}"


_MAX_CACHED_SPECS = 1024
_NUM_POSTED_AHEAD = 2  # number of actions whose receives are posted ahead

LinkPeer = Callable[[int, int], tuple["dist.ProcessGroup | None", int]]
"""Returns the group of the link from a sending to a receiving stage, and the peer's rank in it."""


@dataclass(frozen=True, slots=True)
class SentActivation:
    """A sent activation.

    Attributes:
        spec: Tree spec of the activation.
        edges: Gradient edges of its tensors that require gradients, in order.
    """

    spec: TreeSpec
    edges: Sequence[torch.autograd.graph.GradientEdge]


@dataclass(frozen=True, slots=True)
class ReceivedActivation:
    """A received activation.

    Attributes:
        tree: The activation.
        leaves: Its tensors that require gradients.
    """

    tree: Any
    leaves: Sequence[torch.Tensor]


class StageP2P:
    """Sends and receives of a stage.

    Args:
        division: Assignment of model chunks to stages.
        stage: Index of this stage.
        ends: Returns group and peer of a link.
        device: Compute device of the stage.
        caches_specs: If True, headers are cached, see Note [Cached shapes]; otherwise each activation has one.
        is_ordered: If True, operations start in a common order, see Note [Ordered links].
    """

    def __init__(
        self,
        division: StagePartition,
        stage: int,
        ends: LinkPeer,
        device: torch.device,
        *,
        caches_specs: bool,
        is_ordered: bool,
    ) -> None:
        self._division = division
        self._stage = stage
        self._ends = ends
        self._device = device
        self._caches = caches_specs
        self._is_ordered = is_ordered
        self._due: dict[bool, deque[Message]] = {}  # of each direction, in order; what has not started yet
        self._cached_specs: dict[Hashable, TreeSpec] = {}
        self._outgoing: dict[int, SendChannel] = {}
        self._incoming: dict[int, RecvChannel] = {}
        self._headers_due: dict[int, Message] = {}
        self._checked: set[int] = set()  # numbers of microbatches for which the schedule was checked

    @property
    def is_cache_full(self) -> bool:
        """Whether the cache should be cleared, as batches with ever new values have ever new signatures."""
        return len(self._cached_specs) > _MAX_CACHED_SPECS

    def clear_cache(self) -> None:
        """Clear the cache of headers; all stages must do so at the same batch."""
        self._cached_specs.clear()

    def begin(self, signatures: Sequence[Hashable], *, with_gradients: bool) -> list[StageAction]:
        """Start a batch, and return the stage's actions. No communication.

        Args:
            signatures: Signatures of the microbatches.
            with_gradients: If True, the batch has backwards.

        Raises:
            ConfigError: The schedule does not support this number of microbatches.
        """
        self._signatures = signatures
        self._with_gradients = with_gradients
        schedule = self._division.schedule
        sizes = (self._division.num_stages, len(signatures), self._division.num_chunks)
        if len(signatures) not in self._checked:
            check_orders(schedule, *sizes)
            self._checked.add(len(signatures))
        self._steps = action_list(schedule, self._stage, *sizes, forward_only=not with_gradients)
        self._local: dict[Message, Any] = {}
        self._spec_of: dict[tuple[int, int], TreeSpec] = {}
        self._in_flight: dict[int, deque[Message]] = {}
        self._recv_index: dict[Message, tuple[int, int]] = {}
        expected = incoming_messages(schedule, self._stage, *sizes, forward_only=not with_gradients)
        for sender, messages in expected.items():
            if sender not in self._incoming:
                group, rank = self._ends(sender, self._stage)
                self._incoming[sender] = RecvChannel(rank, group, partial(self._read_header, sender))
            self._incoming[sender].expect([partial(self._expected_specs, sender, message) for message in messages])
            self._recv_index |= {message: (sender, index) for index, message in enumerate(messages)}
        self._due = {is_later: deque() for is_later in (True, False)}
        self._started: set[Message] = set()  # receives
        for message in message_order(schedule, *sizes, forward_only=not with_gradients) if self._is_ordered else ():
            if self._stage in (message.sender, message.receiver):
                self._due[is_to_later_stage(message)].append(message)
        peers = {step.sends.receiver for step in self._steps if step.sends} | set(expected)
        self._sent_at: dict[Message, int] = {}
        self._received_at: dict[Message, int] = {}
        for peer in peers - {self._stage}:
            for place, step in enumerate(action_list(schedule, peer, *sizes, forward_only=not with_gradients)):
                if step.sends is not None:
                    self._sent_at[step.sends] = place
                if step.receives is not None:
                    self._received_at[step.receives] = place
        return self._steps

    def post_recvs(self, index: int) -> None:
        """Post the receives of the next actions from index `index` on."""
        for step in self._steps[index : index + _NUM_POSTED_AHEAD + 1]:
            if step.receives in self._recv_index:
                self._start_recvs(step.receives, can_wait=False)  # type: ignore[arg-type]

    def send_output(self, message: Message, tree: Any) -> SentActivation:
        """Send an activation to the next chunk.

        Raises:
            ConfigError: It has unsupported values, or other shapes than an earlier one of the same kind.
        """
        tensors, spec = flatten(tree)
        edges = [
            torch.autograd.graph.get_gradient_edge(tensor)
            for tensor, one in zip(tensors, spec.tensors, strict=True)
            if one.requires_grad
        ]
        self._spec_of[message.microbatch, message.position] = spec
        if message.receiver == self._stage:
            self._local[message] = [tensor.detach() for tensor in tensors]
            return SentActivation(spec, edges)
        kind = self._kind(message)
        known = self._cached_specs.get(kind) if self._caches else None
        if known is not None and known != spec:
            raise ConfigError(
                f"a pipeline stage's output has tensors {_listed(spec)} for microbatch {message.microbatch}, and had"
                f" {_listed(known)} for an earlier one of the same shapes: by default shapes are cached and must not"
                " depend on values. Give enable_metadata_cache=False to the plugin"
            )
        self._cached_specs[kind] = spec
        self._send(message, tensors, None if known is not None else spec.encode())
        return SentActivation(spec, edges)

    def recv_output(self, message: Message) -> ReceivedActivation:
        """Wait for an activation.

        Raises:
            RankFailedError: The connection is lost, or the wait timed out.
        """
        is_own = message.sender == self._stage
        if is_own:
            tensors = self._local.pop(message)
        else:
            tensors = self._recv(message)
        spec = self._spec_of[message.microbatch, message.position]
        leaves, given = [], []
        for tensor, one in zip(tensors, spec.tensors, strict=True):
            if one.requires_grad and self._with_gradients:
                leaves.append(tensor.requires_grad_())
                # Not a leaf, which in-place layers could not modify; and separate memory, which they may modify.
                tensor = tensor.clone() if is_own else _ReceivedTensor.apply(tensor)  # type: ignore[no-untyped-call]
            given.append(tensor)
        return ReceivedActivation(spec.build(given), leaves)

    def send_gradients(self, message: Message, received: ReceivedActivation) -> None:
        """Send the gradients of a received activation to the previous chunk, zeros where backward left none."""
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in received.leaves]
        if message.receiver == self._stage:
            self._local[message] = gradients
        else:
            self._send(message, gradients, None)

    def recv_gradients(self, message: Message) -> list[torch.Tensor]:
        """Wait for the gradients of a sent activation.

        Raises:
            RankFailedError: The connection is lost, or the wait timed out.
        """
        if message.sender == self._stage:
            gradients: list[torch.Tensor] = self._local.pop(message)
            return gradients
        return self._recv(message)

    def wait(self) -> None:
        """Wait for all sends.

        Raises:
            RankFailedError: A connection is lost, or the wait timed out.
        """
        for link in self._outgoing.values():
            link.wait()

    def _kind(self, message: Message) -> Hashable:
        return message.position, self._signatures[message.microbatch], self._with_gradients

    def _expected_specs(self, sender: int, message: Message) -> Sequence[TensorMeta] | None:
        """Return the specs of an incoming message's tensors, or None if they are not known yet."""
        if message.is_gradient:
            sent = self._spec_of.get((message.microbatch, message.position + 1))
            if sent is None:  # not sent yet
                return None
            return [TensorMeta(one.shape, one.dtype) for one in sent.tensors if one.requires_grad]
        spec = self._cached_specs.get(self._kind(message)) if self._caches else None
        if spec is None:
            self._headers_due[sender] = message
            return None
        self._spec_of[message.microbatch, message.position] = spec
        return spec.specs

    def _read_header(self, sender: int, header: bytes) -> Sequence[TensorMeta]:
        message = self._headers_due.pop(sender)
        spec = TreeSpec.decode(header)
        self._cached_specs[self._kind(message)] = self._spec_of[message.microbatch, message.position] = spec
        return spec.specs

    def _recv(self, message: Message) -> list[torch.Tensor]:
        self._start_recvs(message, can_wait=True)
        sender, index = self._recv_index[message]
        _, tensors = self._incoming[sender].recv(index)
        self._complete_sends(sender, self._sent_at[message])
        return [tensor.to(self._device) for tensor in tensors]

    def _start_recvs(self, last: Message, *, can_wait: bool) -> None:
        """Start to receive a message, after what precedes it in the common order.

        Args:
            last: Message, sent or received by this stage. What precedes a sent one is received.
            can_wait: If True, wait for headers. Otherwise stop before a message with a header, or behind a send.
        """
        if not self._is_ordered:
            if not can_wait:
                sender, index = self._recv_index[last]
                self._incoming[sender].post_recvs(index + 1)
            return
        due = self._due[is_to_later_stage(last)]
        while last not in self._started and due[0] in self._recv_index:
            sender, index = self._recv_index[due[0]]
            channel = self._incoming[sender]
            if can_wait:
                channel.start(index)
            else:
                channel.post_recvs(index + 1)
            if channel.num_started <= index:
                return
            self._started.add(due.popleft())

    def _send(self, message: Message, tensors: Sequence[torch.Tensor], header: bytes | None) -> None:
        if self._is_ordered:
            self._start_recvs(message, can_wait=True)
            if self._due[is_to_later_stage(message)].popleft() != message:
                raise AssertionError(f"stage {self._stage} sends {message} before one that precedes it")
        if message.receiver not in self._outgoing:
            group, rank = self._ends(self._stage, message.receiver)
            self._outgoing[message.receiver] = SendChannel(rank, group)
        self._outgoing[message.receiver].send(tensors, header)
        self._in_flight.setdefault(message.receiver, deque()).append(message)

    def _complete_sends(self, peer: int, index: int) -> None:
        """Complete the sends that `peer` received before its action `index`; see Note [Send completion]."""
        messages = self._in_flight.get(peer)
        count = 0
        while messages and self._received_at[messages[0]] <= index:
            messages.popleft()
            count += 1
        if count:
            self._outgoing[peer].finish(count)


def is_to_later_stage(message: Message) -> bool:
    """Return whether a message goes to a stage of a higher index."""
    return message.sender < message.receiver


class _ReceivedTensor(torch.autograd.Function):
    """Identity without a copy, as there is no other reference to a received tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _listed(spec: TreeSpec) -> str:
    return ", ".join(f"{one.dtype} {one.shape}{' with gradient' * one.requires_grad}" for one in spec.tensors) or "none"

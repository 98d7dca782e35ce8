"""Process group of ranks that share one GPU, which NCCL refuses: device tensors travel through pinned memory by gloo.

The way through torch and this package is that of NCCL: device tensors only, operations of a group one after another in
a stream of its own, behind the caller's stream, and `wait()` lets the caller's stream wait for the result. Unlike
NCCL's, `wait()` also blocks the host, for gloo, and messages of a group may overtake each other's completion: torch has
no batches of messages for groups in Python, so that both ends of a pair may send first here.

Reductions add up in the tensor's dtype, in the order of ranks.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "shared_gpu"
_MESSAGE_TAG, _ALL_TO_ALL_TAG = 77, 78  # of gloo; as in NCCL, only their order matches messages
_SECONDS_TO_END = 5.0
_UNKNOWN_TO_NCCL = (torch.uint16, torch.uint32, torch.uint64, torch.complex32)
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)

Tensors = Sequence[torch.Tensor]
Works = Sequence[Any]
Exchange = Callable[[Tensors, Tensors], Works]


def register() -> None:
    """Make the backend known to `torch.distributed`, once in a process."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, SharedGpuGroup, devices=["cuda"])


class _Work(dist.Work):
    def __init__(self, device: torch.device, inputs: Tensors, outputs: Tensors) -> None:
        super().__init__()
        self._device = device
        self._outputs = list(outputs)
        self._kept = [*inputs, *outputs]  # until the caller's stream waits: another one uses them
        self._is_done = threading.Event()
        self._error: Exception | None = None
        self._arrival = torch.cuda.Event()
        self._future: Any = torch.futures.Future(devices=[device])

    def end(self, error: Exception | None) -> None:
        """Called in the stream of the group."""
        self._error = error
        self._arrival.record()
        if error is None:
            self._future.set_result(self._outputs)  # which waits for this stream, too
        else:
            self._future.set_exception(error)
        self._is_done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._is_done.wait()  # gloo has a timeout
        if self._error is not None:
            raise self._error
        self.synchronize()
        return True

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._arrival)
        self._kept.clear()
        self._outputs.clear()  # those of the future, too: the thread that ended the work may hold it a little longer

    def is_completed(self) -> bool:
        return self._is_done.is_set()

    def is_success(self) -> bool:
        return self._is_done.is_set() and self._error is None

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> Any:
        return self._future


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Operation:
    """Operation on flat tensors, which it forgets before the caller can know that it is done.

    Gemini's pool counts the references to a buffer: one that a thread held a little longer would change its decisions.

    Attributes:
        reads: What is copied to the host.
        writes: What is filled from the host.
        exchange: Function of copies of `reads`, and of memory for `writes`, which sends and fills these, or returns
            what is to be waited for.
        ready: Event of the caller's stream.
        work: What the caller waits for.
        is_message: Whether only two ranks take part.
    """

    reads: list[torch.Tensor]
    writes: list[torch.Tensor]
    exchange: Exchange
    ready: torch.cuda.Event
    work: _Work
    is_message: bool

    def end(self, error: Exception | None) -> None:
        """End it. Call it in the stream of the group, after what writes to the tensors."""
        self.reads.clear()
        self.writes.clear()
        self.work.end(error)


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    """Operation of which gloo has been told; the buffers must live until the works are done."""

    operation: _Operation
    works: Sequence[dist.Work]
    sources: Tensors
    targets: Tensors


class _Communicator:
    """Two threads: one starts operations in the order of their calls, the other ends messages in that order."""

    def __init__(self, gloo: Any) -> None:
        self.gloo = gloo
        self._device: torch.device | None = None
        self._stream: Any = None
        self._operations: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._messages: deque[_InFlight] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._start_all, self._end_messages)]
        for thread in self._threads:
            thread.start()

    def add(self, reads: Tensors, writes: Tensors, exchange: Exchange, *, is_message: bool = False) -> _Work:
        """Queue an operation behind the caller's stream."""
        for tensor in (*reads, *writes):
            self._check(tensor)
        device = self._device
        assert device is not None
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(device))
        work = _Work(device, reads, writes)
        operation = _Operation(
            reads=[_flat(tensor) for tensor in reads],
            writes=[_flat(tensor) for tensor in writes],
            exchange=exchange,
            ready=ready,
            work=work,
            is_message=is_message,
        )
        self._operations.put(operation)
        return work

    def use(self, device: torch.device) -> None:
        """Set the device, once."""
        if self._device is None:
            self._stream = torch.cuda.Stream(device)
            self._device = device

    def close(self, *, waits: bool = False) -> None:
        """End the threads behind what was queued."""
        self._operations.put(None)
        for thread in self._threads if waits else ():
            thread.join(_SECONDS_TO_END)

    def _check(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cuda" or tensor.layout != torch.strided:
            raise RuntimeError(f"Tensors must be CUDA and dense, got one on {tensor.device} of {tensor.layout}")
        if not any(tensor.is_contiguous(memory_format=one) for one in _FORMATS):
            raise RuntimeError("Tensors must be contiguous")
        if tensor.dtype in _UNKNOWN_TO_NCCL:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
        self.use(tensor.device)
        if tensor.device != self._device:
            raise RuntimeError(f"a communicator of {self._device} can't take a tensor of {tensor.device}")

    def _start_all(self) -> None:
        with torch.inference_mode(), _sanitizer():  # where tensors made in either mode may be written to
            while (operation := self._operations.get()) is not None:
                self._let_messages_end(operation)
                started = self._start(operation)
                if started is None:
                    continue
                if not operation.is_message:
                    self._end(started)
                    continue
                with self._changed:
                    self._messages.append(started)
                    self._changed.notify_all()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _let_messages_end(self, operation: _Operation) -> None:
        """Wait for messages in flight: before a collective for all, else for those into the memory that is sent."""
        read = {tensor.untyped_storage().data_ptr() for tensor in operation.reads}

        def is_free() -> bool:
            written = (tensor for one in self._messages for tensor in one.operation.writes)
            return operation.is_message and all(one.untyped_storage().data_ptr() not in read for one in written)

        with self._changed:
            self._changed.wait_for(lambda: not self._messages or is_free())

    def _start(self, operation: _Operation) -> _InFlight | None:
        with torch.cuda.stream(self._stream):
            try:
                self._stream.wait_event(operation.ready)
                sources = [_pinned_like(tensor).copy_(tensor, non_blocking=True) for tensor in operation.reads]
                copied = torch.cuda.Event()
                copied.record(self._stream)
                copied.synchronize()
                targets = [_pinned_like(tensor) for tensor in operation.writes]
                return _InFlight(operation, list(operation.exchange(sources, targets)), sources, targets)
            except Exception as error:  # raised where the caller waits
                operation.end(error)
                return None

    def _end(self, started: _InFlight) -> None:
        operation = started.operation
        with torch.cuda.stream(self._stream):
            try:
                for work in started.works:
                    work.wait()
                for index, target in enumerate(started.targets):
                    operation.writes[index].copy_(target, non_blocking=True)
            except Exception as error:  # raised where the caller waits
                operation.end(error)
                return
            operation.end(None)

    def _end_messages(self) -> None:
        with torch.inference_mode(), _sanitizer():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._messages or self._is_closed)
                    if not self._messages:
                        return
                    message = self._messages[0]
                self._end(message)
                with self._changed:
                    self._messages.popleft()
                    self._changed.notify_all()


class SharedGpuGroup(dist.ProcessGroup):
    """Process group; `torch.distributed` and torch's C++ call its methods by these names."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._communicator = _Communicator(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))
        self._end_of_threads = weakref.finalize(self, self._communicator.close)
        self._name = self._description = ""

    def getBackendName(self) -> str:
        return BACKEND

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> SharedGpuGroup:
        return self

    def shutdown(self) -> None:
        if self._end_of_threads.detach() is not None:
            self._communicator.close(waits=True)

    abort = shutdown

    def allreduce(self, tensors: Tensors, opts: Any = None) -> _Work:
        reduction = _Reduction(opts)

        def exchange(sources: Tensors, targets: Tensors) -> Works:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(reduction.of(self._rows(source)))
            return ()

        return self._communicator.add(tensors, tensors, exchange)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> _Work:
        reduction = _Reduction(opts)

        def exchange(sources: Tensors, targets: Tensors) -> Works:
            rows = self._rows(sources[0])
            for target in targets:
                target.copy_(reduction.of(rows))
            return ()

        return self._communicator.add(tensors, tensors if opts.rootRank == self.rank() else (), exchange)

    def broadcast(self, tensors: Tensors, opts: Any) -> _Work:
        is_root = opts.rootRank == self.rank()

        def exchange(sources: Tensors, targets: Tensors) -> Works:
            forwarded = dist.BroadcastOptions()
            forwarded.rootRank, forwarded.rootTensor = opts.rootRank, 0
            return [self._gloo.broadcast([_bytes(one)], forwarded) for one in (*sources, *targets) if one.numel()]

        return self._communicator.add(tensors if is_root else (), () if is_root else tensors, exchange)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> _Work:
        def exchange(sources: Tensors, targets: Tensors) -> Works:
            for target, row in zip(targets, self._rows(sources[0]), strict=True):
                target.copy_(row)
            return ()

        return self._communicator.add(inputs, outputs[0], exchange)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> _Work:
        def exchange(sources: Tensors, targets: Tensors) -> Works:
            for target, row in zip(targets, self._rows(sources[0]), strict=False):  # the root has targets
                target.copy_(row)
            return ()

        return self._communicator.add(inputs, outputs[0] if opts.rootRank == self.rank() else (), exchange)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> _Work:
        is_root = opts.rootRank == self.rank()

        def exchange(sources: Tensors, targets: Tensors) -> Works:
            if not targets[0].numel():
                return ()
            parts = [[_bytes(one) for one in sources]] if is_root else []
            return [self._gloo.scatter([_bytes(targets[0])], parts, opts)]

        return self._communicator.add(inputs[0] if is_root else (), outputs, exchange)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            _check_sizes(output, tensor, self.size(), "output tensor size must be equal to world_size times input's")

        def exchange(sources: Tensors, targets: Tensors) -> Works:
            for source, target in zip(sources, targets, strict=True):
                target.view(self.size(), -1).copy_(self._rows(source))
            return ()

        return self._communicator.add(inputs, outputs, exchange)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> _Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Work:
        reduction = _Reduction(opts)
        for output, tensor in zip(outputs, inputs, strict=True):
            _check_sizes(tensor, output, self.size(), "input tensor must be the same size as output's times world size")

        def exchange(sources: Tensors, targets: Tensors) -> Works:
            for source, target in zip(sources, targets, strict=True):
                mine = self._rows(source).view(self.size(), self.size(), -1)[:, self.rank()]
                target.copy_(reduction.of(mine))
            return ()

        return self._communicator.add(inputs, outputs, exchange)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> _Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> _Work:
        reduction = _Reduction(opts)

        def exchange(sources: Tensors, targets: Tensors) -> Works:
            mine = self._rows(torch.cat(list(sources))).view(self.size(), self.size(), -1)[:, self.rank()]
            targets[0].copy_(reduction.of(mine))
            return ()

        return self._communicator.add(inputs[0], outputs, exchange)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> _Work:
        received, sent = _lengths(output, output_sizes, self.size()), _lengths(tensor, input_sizes, self.size())

        def exchange(sources: Tensors, targets: Tensors) -> Works:
            return self._exchange_with_all(sources[0].split(sent), targets[0].split(received))

        return self._communicator.add([tensor], [output], exchange)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Work:
        return self._communicator.add(inputs, outputs, self._exchange_with_all)

    def send(self, tensors: Tensors, receiver: int, tag: int = 0) -> _Work:
        def exchange(sources: Tensors, targets: Tensors) -> Works:
            return [self._gloo.send([_bytes(one)], receiver, _MESSAGE_TAG) for one in sources if one.numel()]

        return self._communicator.add(tensors, (), exchange, is_message=True)

    def recv(self, tensors: Tensors, sender: int, tag: int = 0) -> _Work:
        def exchange(sources: Tensors, targets: Tensors) -> Works:
            return [self._gloo.recv([_bytes(one)], sender, _MESSAGE_TAG) for one in targets if one.numel()]

        return self._communicator.add((), tensors, exchange, is_message=True)

    def barrier(self, opts: Any = None) -> _Work:
        self._communicator.use(torch.device("cuda", torch.cuda.current_device()))
        return self._communicator.add((), (), lambda sources, targets: [self._gloo.barrier()])

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    @property
    def _gloo(self) -> Any:
        return self._communicator.gloo

    def _rows(self, source: torch.Tensor) -> torch.Tensor:
        """Return the flat tensors of all ranks, one in a row."""
        rows = source.new_empty((self.size(), source.numel()))
        if source.numel():
            self._gloo.allgather([[_bytes(row) for row in rows]], [_bytes(source)]).wait()
        return rows

    def _exchange_with_all(self, sources: Tensors, targets: Tensors) -> Works:
        works = []
        for other, (source, target) in enumerate(zip(sources, targets, strict=True)):
            if other == self.rank():
                target.copy_(source)
                continue
            if target.numel():
                works.append(self._gloo.recv([_bytes(target)], other, _ALL_TO_ALL_TAG))
            if source.numel():
                works.append(self._gloo.send([_bytes(source)], other, _ALL_TO_ALL_TAG))
        return works


class _Reduction:
    """Reduction of rows, one of each rank, in their dtype and one after the other."""

    def __init__(self, opts: Any) -> None:
        self._kind = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if not any(self._kind == known for known in (*_PAIRWISE, dist.ReduceOp.AVG)):
            raise RuntimeError(
                f"Cannot use {self._kind} with {BACKEND}: it adds up, averages, multiplies, and takes"
                " the largest or smallest"
            )

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        is_average = self._kind == dist.ReduceOp.AVG
        combine = next((function for kind, function in _PAIRWISE.items() if self._kind == kind), torch.add)
        total = rows[0]
        for row in rows[1:]:
            total = combine(total, row)
        if not is_average:
            return total
        return total / len(rows) if total.is_floating_point() else total.div(len(rows), rounding_mode="trunc")


_PAIRWISE: dict[Any, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _pinned_like(flat: torch.Tensor) -> torch.Tensor:
    return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)


def _check_sizes(larger: torch.Tensor, smaller: torch.Tensor, factor: int, text: str) -> None:
    if larger.dtype != smaller.dtype:
        raise TypeError(f"output tensor must have the same type as input tensor, got {larger.dtype}, {smaller.dtype}")
    if larger.numel() != factor * smaller.numel():
        raise ValueError(f"{text}, got {larger.numel()} and {smaller.numel()} elements")


def _lengths(tensor: torch.Tensor, sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return the number of elements of each rank, by sizes along dim 0 or in equal parts."""
    if not sizes:
        return [tensor.numel() // num_ranks] * num_ranks
    row = tensor.numel() // max(1, tensor.shape[0])
    return [size * row for size in sizes]


def _sanitizer() -> Any:
    """Return the mode that shows this thread's copies to torch's sanitizer, if the process has it."""
    module = sys.modules.get("torch.cuda._sanitizer")
    sanitizer = getattr(module, "cuda_sanitizer", None)
    return sanitizer.dispatch if sanitizer is not None and sanitizer.enabled else contextlib.nullcontext()

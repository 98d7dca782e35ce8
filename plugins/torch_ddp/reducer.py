"""Averaging of gradients over replicas: bucketed all-reduces that hooks of the parameters start during backward."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from booster.comm import AllReduce, all_reduce_max, all_reduce_sparse, collective_device, group_size, start_all_reduce
from booster.errors import ConfigError
from booster.fault_tolerance.collective_errors import translate_errors
from booster.fault_tolerance.failure_diagnosis import CollectiveId
from booster.plugins.sharding.buffer_pool import broadcast_joined

from .buckets import MAX_IN_FLIGHT, Bucket, GradBucket, ParamGrad, form_buckets, move_into_view, views_of

# Note [Gradient reduction]
# Every parameter has a hook that autograd calls once `.grad` holds the gradient. A bucket is issued (copied into its
# buffer, divided by the number of ranks, all-reduced) when it is complete *and* all buckets before it were issued;
# what is incomplete at the end of backward is issued then, with zeros for missing gradients. So the collectives have
# one order on all ranks, whatever parameters a rank used. One all-reduce of a byte per parameter then tells which
# parameters any rank used: the others keep `.grad = None`.
# What is reduced is the whole `.grad`, with what earlier backwards left there. That is right because averaging is
# idempotent: what was averaged before is equal on all ranks, and its mean is itself. So it does not matter which
# backwards ran in no_sync, around which forward, or through which method of the model.
# A gradient that arrives after its bucket was issued in the same backward (a parameter used inside and outside of a
# reentrant activation checkpoint) is added to the mean, and the bucket is issued a second time at the end; from then
# on that bucket waits for the end of backward.
# The first rank's buffers follow the gradients rather than precede a forward: then they are equal on all ranks
# between steps, a forward never communicates, and a loss may come from any method of the model.


CommHook: TypeAlias = Callable[[Any, Any], "torch.futures.Future[Any]"]
"""Called with (state, `GradBucket`), returns a future of the averaged flat tensor."""

# The reducer whose optimizer's backward runs, the number of such backwards so far, and the reducers that another
# backward has reached: of the process, as autograd calls hooks in threads of its own.
_active: Reducer | None = None
_num_backwards = 0
_due: list[Reducer] = []
_numbers = itertools.count()


class Reducer:
    """Averages the gradients of a replicated model over the ranks; see Note [Gradient reduction].

    Args:
        module: The user's model, of which no reference is kept.
        group: The ranks that hold replicas; None: the world.
        control_group: The same ranks on the CPU, where `group` is an accelerator's, so that agreeing on used
            parameters does not synchronize host and device; None: `group`.
        bucket_bytes: Size of a bucket. A larger parameter has a bucket of its own.
        uses_views: Gradients are views of the buckets.
        is_static: The same parameters are used in every step, so that ranks agree on them once.
        overlaps: Buckets are reduced while backward runs.
        broadcasts_buffers: After the gradients, all ranks take over the first rank's buffers.
        has_optimizer: The model was boosted with an optimizer.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        control_group: dist.ProcessGroup | None = None,
        bucket_bytes: int,
        uses_views: bool = False,
        is_static: bool = False,
        overlaps: bool = True,
        broadcasts_buffers: bool = True,
        has_optimizer: bool = True,
    ) -> None:
        self._module = weakref.ref(module)
        self._group = group
        self._control_group = control_group or group
        self._bucket_bytes = bucket_bytes
        self._uses_views = uses_views
        self._is_static = is_static
        self._overlaps = overlaps
        self._broadcasts_buffers = broadcasts_buffers
        self._has_optimizer = has_optimizer
        self._number = next(_numbers)
        self._synchronizes = True
        self._reduces_now = False
        self._may_be_local = False
        self._reduced_at = 0
        self._queued_in: int | None = None
        self._next = 0
        self._in_flight: deque[Bucket] = deque()
        self._comm_hook: Callable[[GradBucket], torch.futures.Future[Any]] | None = None
        self._static_use: list[bool] | None = None
        self._trained: list[bool] = []
        self._buckets: list[Bucket] = []
        sparse = _sparse_parameters(module)
        self._grads = [ParamGrad(one, id(one) in sparse) for one in module.parameters()]
        for index, grad in enumerate(self._grads):
            grad.handle = _hook(grad.parameter, partial(_grad_ready, weakref.ref(self), index))

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Replace the averaging of buckets; see `DDPModel.register_comm_hook`."""
        if self._comm_hook is not None:
            raise ConfigError("register_comm_hook() was called twice for one model, which takes one hook: call it once")
        self._comm_hook = partial(hook, state)

    # Which backwards reduce.

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of the backwards inside to this rank; the next backward outside reduces them, too."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Surround a backward of the model's own optimizer, which all ranks run. Collective outside of `no_sync`.

        Raises:
            RankFailedError: A rank is lost or too late.
        """
        global _active, _num_backwards
        _num_backwards += 1
        outer, _active = _active, self
        try:
            if self._synchronizes:
                self._begin(overlaps=self._overlaps)
            else:
                self._may_be_local = True
            yield
        except BaseException:
            self._discard()
            raise
        finally:
            _active, self._reduces_now = outer, False
        if self._synchronizes:
            self._finish()
        _reduce_due()

    def reduce_rest(self) -> None:
        """Reduce what no backward has reduced: of `no_sync`, or of another optimizer's backward.

        Collective, if such a backward ran since the last reduction.
        """
        if not self._may_be_local and self._reduced_at == _num_backwards:
            return
        if any(self._agree([any(grad.is_local and grad.parameter.grad is not None for grad in self._grads)])):
            self.reduce()
        self._note_reduced()

    def reduce(self) -> None:
        """Average all gradients over the ranks, whether or not that was done before. Collective."""
        self._begin(overlaps=False)
        self._finish()

    def mark_local(self) -> None:
        """Have the next `reduce_rest` reduce the gradients that are there, as those of a loaded checkpoint."""
        self._may_be_local = True
        for grad in self._grads:
            grad.is_local = grad.parameter.grad is not None

    def on_grad_ready(self, index: int) -> None:
        """Called by autograd when a gradient is in `.grad`."""
        grad = self._grads[index]
        grad.is_local = True
        bucket = grad.bucket
        if bucket is not None and not bucket.is_issued:
            if self._uses_views:
                move_into_view(grad)
            if self._reduces_now and not grad.has_arrived:
                grad.has_arrived = True
                bucket.num_missing -= 1
                self._issue_complete()
        if _active is None or (_active is not self and not self._has_optimizer):
            self._reduce_after_backward()

    def _reduce_after_backward(self) -> None:
        """Have a backward that is not the optimizer's, such as `loss.backward()`, end with a reduction."""
        backward = torch._C._current_graph_task_id()
        if not self._synchronizes:
            self._may_be_local = True
        elif self._queued_in != backward:
            self._queued_in = backward
            if self not in _due:  # as a backward before that failed may have left it there
                _due.append(self)
            torch.autograd.Variable._execution_engine.queue_callback(_reduce_due)  # type: ignore[attr-defined]

    # Buckets during backward.

    def _begin(self, *, overlaps: bool) -> None:
        self._drain()
        self._form_buckets()
        for bucket in self._buckets:
            bucket.num_missing, bucket.is_issued = len(bucket.grads), False
        for grad in self._grads:
            grad.has_arrived = False
            _move_hook_last(grad)
        self._next, self._reduces_now = 0, overlaps

    def _issue_complete(self) -> None:
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.num_missing > 0 or bucket.waits_for_end:
                return
            self._issue(bucket)
            self._next += 1

    @torch.no_grad()
    def _issue(self, bucket: Bucket) -> None:
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._collect_oldest()
        scale = 1.0 if self._comm_hook is not None else 1.0 / group_size(self._group)
        for grad, view in zip(bucket.grads, bucket.views, strict=True):
            # Taken out of `.grad`: what arrives from now on must not be added to what is in flight.
            source, grad.parameter.grad, grad.is_local = grad.parameter.grad, None, False
            grad.source = source.to_dense() if source is not None and source.is_sparse else source
            if grad.source is None:
                view.zero_()
            else:
                torch.mul(grad.source.detach(), scale, out=view)
        bucket.is_issued, bucket.is_discarded = True, False
        bucket.in_flight = self._start(bucket)
        self._in_flight.append(bucket)

    def _start(self, bucket: Bucket) -> Callable[[], list[torch.Tensor]]:
        if self._comm_hook is not None:
            given = GradBucket(bucket, is_last=bucket is self._buckets[-1])
            with self._hook_errors(bucket):
                future = self._comm_hook(given)
            return partial(self._wait_for_hook, future, bucket)
        flat = bucket.flat
        real = flat.view(flat.dtype.to_real()) if flat.is_complex() else flat
        return partial(_wait_for_sum, start_all_reduce(real, self._group), bucket)

    def _hook_errors(self, bucket: Bucket) -> AbstractContextManager[None]:
        return translate_errors(CollectiveId("communication hook", bucket.index + 1), self._group)

    def _wait_for_hook(self, future: torch.futures.Future[Any], bucket: Bucket) -> list[torch.Tensor]:
        with self._hook_errors(bucket):
            result = future.wait()
        flat = result[0] if isinstance(result, (list, tuple)) else result
        return views_of(flat, [grad.parameter for grad in bucket.grads])

    @torch.no_grad()
    def _collect_oldest(self) -> None:
        """Put the means of the bucket that was issued first into `.grad`."""
        bucket = self._in_flight.popleft()
        assert bucket.in_flight is not None
        means, bucket.in_flight = bucket.in_flight(), None
        if bucket.is_discarded:
            return
        results = [self._result(*one) for one in zip(bucket.grads, bucket.views, strict=True)]
        copies = [(result, mean) for result, mean in zip(results, means, strict=True) if result is not mean]
        if copies:
            torch._foreach_copy_([result for result, _ in copies], [mean for _, mean in copies])
        for grad, result in zip(bucket.grads, results, strict=True):
            late = grad.parameter.grad
            if late is not None:
                result.add_(late.to_dense() if late.is_sparse else late)
            has_any = grad.source is not None or late is not None
            grad.parameter.grad, grad.unclaimed = (result, None) if has_any else (None, result)
            grad.source = None

    def _result(self, grad: ParamGrad, view: torch.Tensor) -> torch.Tensor:
        """Return the memory that a mean goes into."""
        if self._uses_views:
            return view
        # The buffer is used again before it is known whether any rank has a gradient that this one lacks.
        if grad.source is None:
            return torch.empty_like(grad.parameter.detach())
        return grad.source.detach() if grad.source.requires_grad else grad.source

    def _discard(self) -> None:
        """Give gradients in flight back as they are: backward has failed, and other ranks may never reduce them."""
        for bucket in self._in_flight:
            bucket.is_discarded = True
            for grad in bucket.grads:
                grad.parameter.grad, grad.source = grad.source, None

    def _drain(self) -> None:
        while self._in_flight:
            self._collect_oldest()

    # The end of a backward.

    @torch.no_grad()
    def _finish(self) -> None:
        for bucket in self._buckets[self._next :]:
            self._issue(bucket)
        used, repeated = self._agree_on_use()
        self._drain()
        for bucket, is_repeated in zip(self._buckets, repeated, strict=True):
            if is_repeated:
                bucket.waits_for_end = True
                self._issue(bucket)
        self._drain()
        for grad, is_used in zip(self._grads, used, strict=True):
            if is_used and grad.produces_sparse:
                grad.parameter.grad = _sparse_mean(grad.parameter, self._group)
            elif is_used and grad.parameter.grad is None:
                grad.parameter.grad = grad.unclaimed
            grad.unclaimed = None
        module = self._module()
        if self._broadcasts_buffers and module is not None:
            broadcast_joined(list(module.buffers()), self._group)
        self._note_reduced()

    def _note_reduced(self) -> None:
        self._next, self._may_be_local, self._reduced_at = 0, False, _num_backwards
        for grad in self._grads:
            grad.is_local = False
        for bucket in self._buckets:
            bucket.is_issued = False

    def _agree_on_use(self) -> tuple[list[bool], list[bool]]:
        """Return which parameters have a gradient on any rank, and which buckets were issued too early on any."""
        mine = [grad.parameter.grad is not None or grad.source is not None for grad in self._grads]
        if self._static_use is not None:
            if any(is_mine and not is_used for is_mine, is_used in zip(mine, self._static_use, strict=True)):
                raise ConfigError(
                    "static_graph=True promises that all steps use the same parameters, and this backward gave a"
                    " gradient to one that no rank used in the first: make the plugin without static_graph"
                )
            return self._static_use, [False] * len(self._buckets)
        repeated = [any(grad.is_local for grad in bucket.grads) for bucket in self._buckets]
        facts = self._agree(mine + repeated)
        used = facts[: len(mine)]
        if self._is_static:
            self._static_use = used
        return used, facts[len(mine) :]

    def _agree(self, facts: list[bool]) -> list[bool]:
        """Return of every fact whether it is true on any rank. Collective."""
        if not facts:
            return []
        mask = torch.tensor(facts, dtype=torch.uint8, device=collective_device(self._control_group))
        return [bool(one) for one in all_reduce_max(mask, self._control_group).tolist()]

    def _form_buckets(self) -> None:
        """Assign the parameters that train to buckets; again whenever some were frozen or unfrozen since."""
        trained = [grad.parameter.requires_grad for grad in self._grads]
        if trained == self._trained:
            return
        self._trained, self._static_use = trained, None
        for grad in self._grads:
            grad.bucket = grad.view = None
        dense = [grad for grad in self._grads if grad.parameter.requires_grad and not grad.produces_sparse]
        self._buckets = form_buckets(dense, self._bucket_bytes, uses_views=self._uses_views)


def _wait_for_sum(work: AllReduce, bucket: Bucket) -> list[torch.Tensor]:
    work.wait()
    return bucket.views


def _sparse_parameters(module: nn.Module) -> set[int]:
    embeddings = (one for one in module.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.sparse)
    return {id(one.weight) for one in embeddings}


def _sparse_mean(parameter: nn.Parameter, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the mean of a gradient that is sparse along the rows, or absent, on each rank. Collective."""
    given = parameter.grad
    if given is None:
        rows = torch.empty((1, 0), dtype=torch.long, device=parameter.device)
        values = parameter.detach().new_empty((0, *parameter.shape[1:]))
        given = torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=False)
    is_sparse = given.is_sparse
    mean = all_reduce_sparse((given if is_sparse else given.to_sparse(1)) / group_size(group), group)
    return mean if is_sparse else mean.to_dense()


def _hook(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> RemovableHandle | None:
    """Register a hook that stays while the parameter is frozen; torch accepts one for a parameter that trains."""
    is_trained = parameter.requires_grad
    if not (is_trained or parameter.is_floating_point() or parameter.is_complex()):
        return None
    parameter.requires_grad_(True)
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(is_trained)
    return handle


def _move_hook_last(grad: ParamGrad) -> None:
    """Have hooks that the user registered later called first: the reducer takes the gradient as they leave it."""
    hooks = grad.parameter._post_accumulate_grad_hooks
    if grad.handle is not None and hooks is not None and len(hooks) > 1:
        hooks[grad.handle.id] = hooks.pop(grad.handle.id)


def _grad_ready(reducer: weakref.ref[Reducer], index: int, _: torch.Tensor) -> None:
    # Weakly: Python's garbage collector does not see through a parameter to its hooks, and would free neither.
    alive = reducer()
    if alive is not None:
        alive.on_grad_ready(index)


def _reduce_due() -> None:
    """Reduce what backwards that were not the optimizer's have reached, in one order on all ranks."""
    if _active is not None:
        return  # whose collectives come first, and which calls this when they are done
    while _due:
        reducer = min(_due, key=lambda one: one._number)
        _due.remove(reducer)
        reducer._queued_in = None
        reducer.reduce()

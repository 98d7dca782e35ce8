"""Gradient averaging over replicas: bucketed all-reduces, started by parameter hooks during backward."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from booster.comm import (
    AllReduce,
    all_reduce_sparse,
    any_rank,
    any_rank_or_different,
    group_size,
    start_all_reduce,
)
from booster.errors import ConfigError
from booster.fault_tolerance.collective_errors import translate_errors
from booster.fault_tolerance.failure_diagnosis import CollectiveId
from booster.plugins.base import ForwardWrites, taking_hooks
from booster.plugins.step_settings import StepSettings
from booster.plugins.sync_batch_norm import synchronize_buffers

from .config import DDPConfig
from .grad_bucket import (
    MAX_IN_FLIGHT,
    Bucket,
    GradBucket,
    ParamGrad,
    allocate_buffers,
    assign_buckets,
    move_into_view,
    views_of,
)

# Note [Gradient reduction]
# Every parameter has a hook that autograd calls once `.grad` holds the gradient. A bucket is issued (copied into its
# buffer, divided by the number of ranks, all-reduced) when it is complete *and* all buckets before it are issued.
# Incomplete buckets are issued at the end of backward, with zeros for missing gradients. The collectives therefore
# have the same order on all ranks, even if ranks use different parameters. One all-reduce of a byte per parameter then
# determines the parameters that no rank used: these keep `.grad = None`.
# The full `.grad` is reduced, including earlier backwards. This is correct because averaging is idempotent: an averaged
# gradient is equal on all ranks, and its mean is itself. It does not matter which backwards ran under no_sync, for
# which forward, or through which method of the model.
# A frozen parameter is in no bucket, but may have a gradient from before it was frozen, which no_sync or the backward
# of another optimizer has left local. Once all ranks know of such gradients, they are reduced in further buckets, in
# each backward until they are cleared.
# A gradient may arrive after its bucket was issued in the same backward (a parameter used inside and outside of a
# reentrant activation checkpoint). It is added to the mean, and the bucket is issued a second time at the end. Later
# backwards issue that bucket at their end only.
# The first rank's buffers are broadcast after the gradients, not before a forward. Buffers are then equal on all ranks
# between steps, a forward never communicates, and any method of the model may compute the loss.


_BucketHook: TypeAlias = Callable[[GradBucket], "torch.futures.Future[Any]"]
CommHook: TypeAlias = Callable[[Any, Any], "torch.futures.Future[Any]"]
"""Callable with arguments (state, `GradBucket`) that returns a future of the averaged flat tensor."""

# Reducer whose optimizer's backward is running, number of such backwards, and reducers reached by another backward.
# Process-wide, because autograd calls hooks in its own threads.
_active: Reducer | None = None
_num_backwards = 0
_due: list[Reducer] = []
_numbers = itertools.count()


class Reducer:
    """Averages the gradients of a replicated model over the ranks; see Note [Gradient reduction].

    Args:
        module: The user's model; no reference is kept.
        config: Options of the plugin.
        control_group: CPU group of all ranks, which avoids a device synchronization for the all-reduce of used
            parameters; optional, defaults to the world group.
        overlaps: If True, buckets are reduced while backward runs.
        has_optimizer: If True, the model was boosted with an optimizer.
    """

    def __init__(
        self,
        module: nn.Module,
        config: DDPConfig,
        *,
        control_group: dist.ProcessGroup | None,
        overlaps: bool,
        has_optimizer: bool,
    ) -> None:
        self._module = weakref.ref(module)
        self._config = config
        self._control_group = control_group
        self._overlaps = overlaps
        self._has_optimizer = has_optimizer
        self._number = next(_numbers)
        self.settings = StepSettings()
        self._stepped_at = _num_backwards
        self._synchronizes = True
        self._reduces_now = self._reduced_in_backward = False
        self._may_be_local = False
        self._reduced_at = 0
        self._queued_in: int | None = None
        self._next = 0
        self._in_flight: deque[Bucket] = deque()
        self._comm_hook: _BucketHook | None = None
        self._leaves_local = False
        self.writes = ForwardWrites()
        self._hooked: list[ParamGrad] = []
        self._early: ParamGrad | None = None
        self._static_use: list[bool] | None = None
        self._trained: list[bool] = []
        self._buckets: list[Bucket] = []
        self._num_formed = 0
        embeddings = [one for one in module.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag))]
        sparse = {id(one.weight) for one in embeddings if one.sparse}
        self._grads = [ParamGrad(one, id(one) in sparse) for one in module.parameters()]
        self._known = {id(grad.parameter) for grad in self._grads}
        for index, grad in enumerate(self._grads):
            grad.handle = _hook(grad.parameter, partial(_grad_ready, weakref.ref(self), index))

    def knows(self, parameter: torch.Tensor) -> bool:
        """Return whether the gradients of a parameter are averaged."""
        return id(parameter) in self._known

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Replace the averaging of buckets; see `DDPModel.register_comm_hook`."""
        if self._comm_hook is not None:
            raise ConfigError("register_comm_hook() was called twice for one model, which takes one hook: call it once")
        self._comm_hook = partial(hook, state)

    def leave_gradients_local(self, handler: str) -> None:
        """Average nothing: a gradient handler does. The ranks still exchange which parameters are used.

        Args:
            handler: Name of the handler, for the message.

        Raises:
            ConfigError: The model has sparse gradients, or a communication hook.
        """
        if any(grad.produces_sparse for grad in self._grads):
            raise ConfigError(
                f"the gradient handler {handler} reduces over 'dp', and the model has an embedding with sparse=True,"
                " whose gradients TorchDDPPlugin averages row by row: make the embedding with sparse=False"
            )
        self.register_comm_hook(None, _keep_local)
        self._leaves_local = True

    # Backwards that reduce.

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of the backwards in the block local; the next backward outside reduces them."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Reduce the gradients of a backward of the model's optimizer in the block. Collective outside of `no_sync`.

        Raises:
            RankFailedError: A rank is lost or did not arrive before the timeout.
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
            # Restore the local gradients in flight, because other ranks may never reduce them.
            for bucket in self._in_flight:
                bucket.is_discarded = True
                for grad in bucket.grads:
                    # A view of the bucket is partly reduced, and lost.
                    grad.parameter.grad = None if self._config.gradient_as_bucket_view else grad.source
                    grad.source, grad.is_local = None, True
            self._early = None
            raise
        finally:
            _active, self._reduces_now = outer, False
        if self._synchronizes:
            self._finish()
        _reduce_due()

    def reduce_rest(self) -> None:
        """Reduce gradients that no backward has reduced.

        Those are of `no_sync`, of another optimizer's backward, or set by hand, as from `torch.autograd.grad`.

        Collective, if such a backward ran since the last reduction, or if none ran since the last step and there are
        gradients.
        """
        if self._stepped_at == _num_backwards and any(grad.parameter.grad is not None for grad in self._grads):
            self.mark_local()
        if not self._may_be_local and self._reduced_at == _num_backwards:
            return
        is_local = any(grad.is_local and grad.parameter.grad is not None for grad in self._grads)
        if any(any_rank([is_local], self._control_group)):
            self.reduce()
        self._note_reduced()

    def end_step(self, num_steps: int) -> None:
        """Note the end of a step of the model's optimizer, and how many there were."""
        self.settings.num_steps = num_steps
        self._stepped_at = _num_backwards

    def reduce_after_backward(self) -> None:
        """Average all gradients after a backward that is not the optimizer's. Collective over the group."""
        self._early = next((one for one in self._grads if one.has_arrived and one.parameter.grad is None), None)
        self.reduce()

    def reduce(self) -> None:
        """Average all gradients over the ranks, including averaged ones. Collective over the group."""
        self._begin(overlaps=False)
        self._finish()

    def mark_local(self) -> None:
        """Mark existing gradients, such as those of a loaded checkpoint, for the next `reduce_rest`."""
        self._may_be_local = True
        for grad in self._grads:
            grad.is_local = grad.parameter.grad is not None

    def on_grad_ready(self, index: int) -> None:
        """Handle a gradient that autograd has stored in `.grad`."""
        grad = self._grads[index]
        grad.is_local = True
        is_own = _active is self
        if is_own and grad.version is not None and grad.version != grad.parameter._version and self._synchronizes:
            self._early = grad  # written by a hook of the user, which comes before
        bucket = grad.bucket
        if bucket is not None and not bucket.is_issued:
            if self._config.gradient_as_bucket_view:
                move_into_view(grad)
            if not grad.has_arrived and is_own and self._synchronizes:
                grad.has_arrived = True
                if self._reduces_now:
                    bucket.num_missing -= 1
                    self._issue_complete()
        if not is_own and (_active is None or not self._has_optimizer):
            self._reduce_after_backward(grad)

    def _reduce_after_backward(self, grad: ParamGrad) -> None:
        """Queue a reduction at the end of a backward that is not the optimizer's, such as `loss.backward()`."""
        backward = torch._C._current_graph_task_id()
        if not self._synchronizes:
            self._may_be_local = True
            return
        if self._queued_in != backward:
            self._queued_in = backward
            for one in self._grads if self in _due else ():  # a failed backward may have left it there
                one.has_arrived = False
            if self not in _due:
                _due.append(self)
            torch.autograd.Variable._execution_engine.queue_callback(_reduce_due)  # type: ignore[attr-defined]
        grad.has_arrived = True

    # Buckets during backward.

    def _begin(self, *, overlaps: bool) -> None:
        self._drain()
        self._form_buckets()
        for grad in self._hooked:
            grad.version = None
        self._hooked.clear()
        for bucket in self._buckets:
            bucket.num_missing, bucket.is_issued = len(bucket.grads), False
        for grad in self._grads:
            grad.has_arrived = False
            hooks = grad.parameter._post_accumulate_grad_hooks
            if grad.handle is not None and hooks is not None and len(hooks) > 1:
                hooks[grad.handle.id] = hooks.pop(grad.handle.id)  # behind hooks that the user registered later
                grad.version = grad.parameter._version
                self._hooked.append(grad)
        self._next, self._reduces_now, self._reduced_in_backward = 0, overlaps, overlaps

    def _issue_complete(self) -> None:
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.num_missing > 0 or bucket.waits_for_end:
                return
            self._issue(bucket, self._comm_hook)
            self._next += 1

    @torch.no_grad()
    def _issue(self, bucket: Bucket, hook: _BucketHook | None) -> None:
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._collect_oldest()
        scale = 1.0 if hook is not None else 1.0 / group_size()
        for grad, view in zip(bucket.grads, bucket.views, strict=True):
            # Removed from `.grad`: autograd must not accumulate into a gradient in flight.
            source, grad.parameter.grad, grad.is_local = grad.parameter.grad, None, False
            grad.source = source.to_dense() if source is not None and source.is_sparse else source
            if grad.source is None:
                if grad.has_arrived:  # cleared by a hook of the user
                    self._early = grad
                view.zero_()
            else:
                torch.mul(grad.source.detach(), scale, out=view)
        bucket.is_issued, bucket.is_discarded = True, False
        if hook is None:
            flat = bucket.flat
            real = flat.view(flat.dtype.to_real()) if flat.is_complex() else flat
            bucket.in_flight = start_all_reduce(real)
        else:
            given = GradBucket(bucket, is_last=bucket is self._buckets[-1])
            with translate_errors(CollectiveId("communication hook", bucket.index + 1), None):
                bucket.in_flight = hook(given)
        self._in_flight.append(bucket)

    def _wait_for(self, bucket: Bucket) -> list[torch.Tensor]:
        """Wait for a bucket in flight and return its means."""
        work = bucket.in_flight
        if isinstance(work, AllReduce):
            work.wait()
            means = bucket.views
        else:
            future = work
            assert future is not None
            with translate_errors(CollectiveId("communication hook", bucket.index + 1), None):
                result = future.wait()
            flat = result[0] if isinstance(result, (list, tuple)) else result
            means = views_of(flat, [grad.parameter for grad in bucket.grads])
        bucket.in_flight = None
        return means

    @torch.no_grad()
    def _collect_oldest(self) -> None:
        """Wait for the oldest bucket in flight and store its means in `.grad`."""
        bucket = self._in_flight.popleft()
        means = self._wait_for(bucket)
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
        """Return the destination tensor of a mean."""
        if self._config.gradient_as_bucket_view:
            return view
        # The buffer is reused before the ranks have exchanged which parameters are used.
        if grad.source is None or grad.source.is_conj():
            return torch.empty_like(grad.parameter.detach())
        return grad.source.detach() if grad.source.requires_grad else grad.source

    def _drain(self) -> None:
        while self._in_flight:
            self._collect_oldest()

    # End of a backward.

    @torch.no_grad()
    def _finish(self) -> None:
        for bucket in self._buckets[self._next :]:
            self._issue(bucket, self._comm_hook)
        used, repeated = self._agree_on_use()
        self._drain()
        for bucket, is_repeated in zip(self._buckets, repeated, strict=True):
            if is_repeated:
                bucket.waits_for_end = True
                self._issue(bucket, self._comm_hook)
        self._drain()
        self._reduce_frozen(used)
        for grad, is_used in zip(self._grads, used, strict=True):
            if is_used and grad.produces_sparse:
                grad.parameter.grad = _sparse_mean(grad.parameter)
            elif is_used and grad.parameter.grad is None:
                grad.parameter.grad = grad.unclaimed
            grad.unclaimed = None
        module = self._module()
        if self._config.broadcast_buffers and module is not None:
            synchronize_buffers(module)
        self._note_reduced()

    def _reduce_frozen(self, used: Sequence[bool]) -> None:
        """Average the gradients of frozen parameters, if any rank has one. Collective then."""
        pairs = zip(self._grads, used, strict=True)
        frozen = [grad for grad, is_used in pairs if is_used and grad.bucket is None and not grad.produces_sparse]
        # A hook knows the model's buckets only, by their number.
        hook = self._comm_hook if self._leaves_local else None
        for bucket in self._new_buckets(frozen):
            self._issue(bucket, hook)
        self._drain()
        for grad in frozen:
            grad.bucket = grad.view = None

    def _note_reduced(self) -> None:
        self._next, self._may_be_local, self._reduced_at = 0, False, _num_backwards
        for grad in self._grads:
            grad.is_local = False
        for bucket in self._buckets:
            bucket.is_issued = False

    def _agree_on_use(self) -> tuple[list[bool], list[bool]]:
        """Return which parameters have a gradient on any rank, and which buckets must be issued again."""
        mine = [grad.parameter.grad is not None or grad.source is not None for grad in self._grads]
        if self._static_use is not None:
            if any(is_mine and not is_used for is_mine, is_used in zip(mine, self._static_use, strict=True)):
                raise ConfigError(
                    "static_graph=True promises that all steps use the same parameters, and this backward gave a"
                    " gradient to one that no rank used in the first: make the plugin without static_graph"
                )
            if self._early is not None:
                self._raise_early_step()
            return self._static_use, [False] * len(self._buckets)
        repeated = [any(grad.is_local for grad in bucket.grads) for bucket in self._buckets]
        writes = self.writes.bytes()
        flags, differs = any_rank_or_different(
            [*mine, *repeated, self._early is not None], [*writes, *self.settings.bytes()], self._control_group
        )
        if any(differs):
            raise self.writes.error() if any(differs[: len(writes)]) else self.settings.error(self._control_group)
        self.writes.forget()
        self.settings.forget_clipping()
        if flags.pop():
            self._raise_early_step()
        used, repeated = flags[: len(mine)], flags[len(mine) :]
        if self._config.static_graph and self._reduced_in_backward:  # else no gradient can be late
            self._static_use = used
        return used, repeated

    def _raise_early_step(self) -> NoReturn:
        module, early, self._early = self._module(), self._early, None
        named = () if module is None or early is None else module.named_parameters()
        name = next((repr(name) for name, one in named if early is not None and one is early.parameter), "a parameter")
        raise ConfigError(
            f"a hook in backward, as of register_post_accumulate_grad_hook(), has written {name} or cleared its .grad"
            " before the ranks have averaged it, as an optimizer in backward does, so that the ranks' weights differ:"
            " leave the hook out, and call step() after backward(), where .grad has the mean"
        )

    def _form_buckets(self) -> None:
        """Assign trainable parameters to buckets, if the set of trainable parameters has changed."""
        trained = [grad.parameter.requires_grad for grad in self._grads]
        if trained == self._trained:
            return
        self._trained, self._static_use = trained, None
        for grad in self._grads:
            grad.bucket = grad.view = None
        dense = [grad for grad in self._grads if grad.parameter.requires_grad and not grad.produces_sparse]
        self._buckets = self._new_buckets(dense)

    def _new_buckets(self, grads: Sequence[ParamGrad]) -> list[Bucket]:
        """Assign gradients to buckets with buffers, of which they become views with `gradient_as_bucket_view`."""
        uses_views = self._config.gradient_as_bucket_view
        members = assign_buckets(grads, self._config.bucket_bytes)
        first_index, self._num_formed = self._num_formed, self._num_formed + len(members)
        buckets = []
        for index, (own, flat) in enumerate(
            zip(members, allocate_buffers(members, uses_views), strict=True), first_index
        ):
            bucket = Bucket(index, own, flat, views_of(flat, [grad.parameter for grad in own]))
            buckets.append(bucket)
            for grad, view in zip(own, bucket.views, strict=True):
                grad.bucket, grad.view = bucket, view
                if uses_views:
                    move_into_view(grad)
        return buckets


def _sparse_mean(parameter: nn.Parameter) -> torch.Tensor:
    """Return the mean of a gradient that is sparse along the rows, or missing, on each rank. Collective."""
    given = parameter.grad
    if given is None:
        rows = torch.empty((1, 0), dtype=torch.long, device=parameter.device)
        values = parameter.detach().new_empty((0, *parameter.shape[1:]))
        given = torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=False)
    is_sparse = given.is_sparse
    mean = all_reduce_sparse((given if is_sparse else given.to_sparse(1)) / group_size())
    return mean if is_sparse else mean.to_dense()


def _keep_local(_: object, bucket: GradBucket) -> torch.futures.Future[Any]:
    """Communication hook that leaves this rank's gradients as they are."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _hook(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> RemovableHandle | None:
    """Register a hook that persists while the parameter is frozen; torch accepts one for trainable parameters only."""
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return None
    with taking_hooks(parameter):
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    return handle


def _grad_ready(reducer: weakref.ref[Reducer], index: int, _: torch.Tensor) -> None:
    # Weak reference: Python's garbage collector does not traverse a parameter's hooks, so a cycle would leak.
    alive = reducer()
    if alive is not None:
        alive.on_grad_ready(index)


def _reduce_due() -> None:
    """Run the reductions queued by backwards that are not the optimizer's, in the same order on all ranks."""
    if _active is not None:
        return  # the active reducer's collectives come first; it calls this function afterwards
    while _due:
        reducer = min(_due, key=lambda one: one._number)
        _due.remove(reducer)
        reducer._queued_in = None
        reducer.reduce_after_backward()

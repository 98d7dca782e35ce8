"""Client of a torch.distributed store with a timeout for every call: the process that serves it may be stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from .threads import join_at_exit

# Note [Store timeouts]
# TCPStore has timeouts for missing keys, and none for a server that accepts a request and never answers: a rank that is
# stopped, as by a debugger or a frozen host, and serves the store. A caller would wait without end, and its lock would
# block all other threads of the process. So each request runs in a separate thread, which is abandoned after a timeout.
# A client with an unanswered request gets no further one until the answer arrives: the abandoned thread holds its lock.
# A server may also be slow: torch's resolves the name of a connecting host in the one thread that serves all requests,
# which takes 5 s and more if the name service does not answer. So a new client has the set-up timeout.

_hung_clients: WeakKeyDictionary[Store, _PendingCall] = WeakKeyDictionary()  # unanswered request of a client


class TimeoutStore:
    """Store whose calls raise `DistNetworkError` if no answer arrives in time.

    Args:
        client: Client of the store that no other thread waits in.
        prefix: Prefix of all keys.
        seconds: Timeout of a call.
    """

    def __init__(self, client: Any, prefix: str, seconds: float) -> None:
        self._client = client
        self._prefix = prefix
        self._seconds = seconds
        self._store: Any = PrefixStore(prefix, client)  # torch's stubs give its values as str; they are bytes

    def under(self, prefix: str) -> TimeoutStore:
        """Return the store with a further prefix."""
        return TimeoutStore(self._client, f"{self._prefix}/{prefix}", self._seconds)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._call(lambda: self._store.check(list(keys))))

    def get(self, key: str) -> bytes:
        """Return the value of an existing key; a missing one would be waited for."""
        return bytes(self._call(lambda: self._store.get(key)))

    def set(self, key: str, value: str | bytes) -> None:
        self._call(lambda: self._store.set(key, value))

    def append(self, key: str, value: str) -> None:
        self._call(lambda: self._store.append(key, value))

    def compare_set(self, key: str, expected: str, value: str | bytes) -> None:
        """Set the value of a key if it has the expected one; "" expects a missing key."""
        self._call(lambda: self._store.compare_set(key, expected, value))

    def add(self, key: str, amount: int) -> int:
        return int(self._call(lambda: self._store.add(key, amount)))

    def delete_key(self, key: str) -> None:
        self._call(lambda: self._store.delete_key(key))

    def has_extended_api(self) -> bool:
        """Return whether `multi_get` works. No communication."""
        return bool(self._store.has_extended_api())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of existing keys."""
        return [bytes(value) for value in self._call(lambda: self._store.multi_get(list(keys)))]

    def _call(self, function: Callable[[], Any]) -> Any:
        hung = _hung_clients.get(self._client)
        if hung is not None and hung.is_alive():
            raise _NoAnswerError(f"it did not answer within {self._seconds:g} s")
        call = _PendingCall(function)
        try:
            return call.result_within(self._seconds)
        except _NoAnswerError:
            _hung_clients[self._client] = call
            raise


class _NoAnswerError(dist.DistNetworkError):
    """Call that did not return in time."""


def call_with_timeout(function: Callable[[], Any], seconds: float) -> Any:
    """Return the result of a function that may wait in a store, run by a thread that is abandoned at the timeout.

    Raises:
        DistNetworkError: It did not return within `seconds`.
        Exception: The function's own error.
    """
    return _PendingCall(function).result_within(seconds)


class _PendingCall(threading.Thread):
    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(name="booster-store", daemon=True)
        self._function = function
        self._result: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._result = self._function()
        except Exception as error:  # raised in the calling thread
            self._error = error

    def result_within(self, seconds: float) -> Any:
        join_at_exit(self)  # it may be abandoned, or its caller interrupted
        self.start()
        self.join(seconds)
        if self.is_alive():
            raise _NoAnswerError(f"it did not answer within {seconds:g} s")
        if self._error is not None:
            raise self._error
        return self._result

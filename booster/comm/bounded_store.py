"""A store of torch.distributed that is waited for with a limit: the process that serves it may be stopped, too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from booster.threads_at_exit import join_at_exit

__all__ = ["BoundedStore", "answer_within", "new_client"]

# Note [Answers]
# TCPStore has limits for keys that don't come, and none for a server that takes a question and never answers: a rank
# that is stopped, as by a debugger or a frozen machine, and serves the store. Who asks it waits for ever, and its lock
# keeps all other threads of the process waiting. So each question is asked by a thread of its own, and given up after a
# time. A client that has got no answer is asked nothing more until that comes: the lost thread holds its lock.
# A server may also be late: torch's looks up the name of who connects, in the one thread that answers all, which takes
# 5 s and more where the name service does not answer. So a new client is waited for as long as set-up may take.

_lost: WeakKeyDictionary[Store, _Question] = WeakKeyDictionary()  # what a client was asked and has not answered


def new_client(store: Any, seconds: float) -> Any:
    """Returns a further client of a store, for those who would wait in one that others use.

    Raises:
        DistNetworkError: The process that serves it is gone, or does not answer in so many seconds.
    """
    return answer_within(store.clone, seconds)


class BoundedStore:
    """What this package asks of a store; each call raises `DistNetworkError` where no answer comes.

    Args:
        client: A client of the store; not shared with others that wait in it.
        prefix: Of all keys.
        seconds: How long an answer is waited for.
    """

    def __init__(self, client: Any, prefix: str, seconds: float) -> None:
        self._client = client
        self._prefix = prefix
        self._seconds = seconds
        self._store: Any = PrefixStore(prefix, client)  # torch's stubs give its values as str; they are bytes

    def under(self, prefix: str) -> BoundedStore:
        """Returns the part of the store under a further prefix."""
        return BoundedStore(self._client, f"{self._prefix}/{prefix}", self._seconds)

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys are there."""
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def get(self, key: str) -> bytes:
        """Returns the value of a key that is there; one that is not would be waited for."""
        return bytes(self._ask(lambda: self._store.get(key)))

    def set(self, key: str, value: str | bytes) -> None:
        """Gives a key a value."""
        self._ask(lambda: self._store.set(key, value))

    def append(self, key: str, value: str) -> None:
        """Puts a value behind that of a key."""
        self._ask(lambda: self._store.append(key, value))

    def compare_set(self, key: str, expected: str, value: str | bytes) -> None:
        """Gives a key a value if it has the expected one, or with "" if it is not there."""
        self._ask(lambda: self._store.compare_set(key, expected, value))

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns it."""
        return int(self._ask(lambda: self._store.add(key, amount)))

    def delete_key(self, key: str) -> None:
        """Removes a key."""
        self._ask(lambda: self._store.delete_key(key))

    def has_extended_api(self) -> bool:
        """Returns whether `multi_get` works. No communication."""
        return bool(self._store.has_extended_api())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the values of keys that are there."""
        return [bytes(value) for value in self._ask(lambda: self._store.multi_get(list(keys)))]

    def _ask(self, question: Callable[[], Any]) -> Any:
        lost = _lost.get(self._client)
        if lost is not None and lost.is_alive():
            raise _NoAnswerError(self._seconds)
        asked = _Question(question)
        try:
            return asked.answer_within(self._seconds)
        except _NoAnswerError:
            _lost[self._client] = asked
            raise


class _NoAnswerError(dist.DistNetworkError):
    def __init__(self, seconds: float) -> None:
        super().__init__(f"it did not answer within {seconds:g} s")


def answer_within(question: Callable[[], Any], seconds: float) -> Any:
    """Returns what a function does that may wait in a store; it is run by a thread that is given up after a time.

    Raises:
        DistNetworkError: It did not come back in so many seconds.
        Exception: What it raised.
    """
    return _Question(question).answer_within(seconds)


class _Question(threading.Thread):
    def __init__(self, question: Callable[[], Any]) -> None:
        super().__init__(name="booster-store", daemon=True)
        self._question = question
        self._answer: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._answer = self._question()
        except Exception as error:  # raised where it was asked
            self._error = error

    def answer_within(self, seconds: float) -> Any:
        """Asks, and returns the answer. Raises as the function of the same name."""
        join_at_exit(self)  # it may be given up, or its asker interrupted
        self.start()
        self.join(seconds)
        if self.is_alive():
            raise _NoAnswerError(seconds)
        if self._error is not None:
            raise self._error
        return self._answer

"""Calls of a driver in threads of their own: on a card that has failed, a call may never return."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from cardwise.clock import Clock

T = TypeVar("T")


class Call(Generic[T]):
    """One call, which begins at once. If it never returns, only its own thread hangs."""

    def __init__(self, function: Callable[[], T], name: str, clock: Clock) -> None:
        self._function = function
        self._clock = clock
        self._answer: T
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def over(self, seconds: float = 0.0) -> bool:
        """Whether it has returned or raised; waits for that, `seconds` at most."""
        return self._clock.join(self._thread, seconds) if seconds > 0.0 else not self._thread.is_alive()

    def answer(self) -> T:
        """What it returned. Only when it is over; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._answer

    def _run(self) -> None:
        try:
            self._answer = self._function()
        except Exception as error:  # noqa: BLE001 - raised by `answer`
            self._error = error

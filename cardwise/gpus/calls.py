"""Driver calls in threads of their own: on a failed card, a call may never return."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from cardwise.clock import Clock

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """A call that starts at once in its own thread. If the call never returns, only this thread hangs."""

    def __init__(self, function: Callable[[], T], name: str, clock: Clock) -> None:
        self._function = function
        self._clock = clock
        self._return_value: T
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def has_returned(self, timeout: float = 0.0) -> bool:
        """Whether the call has returned or raised; waits up to `timeout` seconds for that."""
        return self._clock.join(self._thread, timeout) if timeout > 0.0 else not self._thread.is_alive()

    def result(self) -> T:
        """Return the return value of the call, or raise its exception. Call this only after `has_returned` was True."""
        if self._error is not None:
            raise self._error
        return self._return_value

    def _run(self) -> None:
        try:
            self._return_value = self._function()
        except Exception as error:  # noqa: BLE001 - raised by `result`
            self._error = error

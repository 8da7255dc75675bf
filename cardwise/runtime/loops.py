"""A thread that runs a function when it is woken, and at an interval."""

import threading
from collections.abc import Callable, Sequence

import structlog
from prometheus_client import Counter

from cardwise.clock import Clock
from cardwise.kube.backoff import Backoff
from cardwise.supervision import supervised_thread

_log = structlog.get_logger(__name__)


def run_steps(steps: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """A turn that takes all these steps. One that fails does not keep the others; it is raised after them."""

    def run_steps() -> None:
        failed: list[Exception] = []
        for step in steps:
            try:
                step()
            except Exception as error:  # noqa: BLE001 - raised below
                failed.append(error)
        if failed:
            raise ExceptionGroup("steps failed", failed)

    return run_steps


class Loop:
    """Takes its first turn when it starts. A turn that raises is logged as `failed` and taken again after a while, in
    which nobody wakes it; `expected` errors are no faults of ours.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], None],
        *,
        failed: str,
        failures: Counter | None = None,
        expected: tuple[type[Exception], ...] = (),
        every: float | None,
        cap: float = 5.0,
        clock: Clock,
    ) -> None:
        """`every`: seconds from the end of a turn to the next, None: when woken only. `failures` by the loop's name.
        `cap`: the most seconds that a failed turn keeps it away.
        """
        self._name = name
        self._step = step
        self._failed = failed
        self._failures = failures
        self._expected = expected
        self._every = self._pause = every
        self._clock = clock
        self._backoff = Backoff(initial=0.2, cap=cap)
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = supervised_thread(self._run, name, clock)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Waits for the turn that is under way, `timeout` seconds at most."""
        self.request_stop()
        if self._thread.is_alive():
            self._clock.join(self._thread, timeout)

    def request_stop(self) -> None:
        """As `stop`, without waiting."""
        self._stopping.set()
        self._wake.set()

    def wake(self) -> None:
        """Take a turn now. From any thread."""
        self._wake.set()

    def run_within(self, seconds: float) -> None:
        """Take the next turn after so many seconds at most. From within a turn."""
        self._pause = seconds if self._pause is None else min(self._pause, seconds)

    def run_once(self) -> float | None:
        """One turn, in the caller's thread; how long to stay away after it has failed, None when it has not."""
        self._wake.clear()
        self._pause = self._every
        try:
            self._step()
        except self._expected as error:
            delay = self._backoff.next_delay(getattr(error, "retry_after", None))
            _log.warning(self._failed, error=str(error), retry_in=round(delay, 1))
            return delay
        except Exception:  # noqa: BLE001 - the thread's outermost loop: logged, and it goes on
            if self._failures is not None:
                self._failures.labels(self._name).inc()
            _log.exception(self._failed)
            return self._backoff.next_delay()
        self._backoff.reset()
        return None

    def _run(self) -> None:
        while not self._stopping.is_set():
            delay = self.run_once()
            if delay is None:
                self._clock.wait(self._wake, self._pause)
            else:
                self._clock.wait(self._stopping, delay)

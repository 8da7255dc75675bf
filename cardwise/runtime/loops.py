"""Threads that run a function at an interval, and when another thread wakes them."""

import threading
from collections.abc import Callable, Sequence

import structlog
from prometheus_client import Counter

from cardwise.clock import Clock
from cardwise.kube.backoff import Backoff
from cardwise.supervision import supervised_thread

_log = structlog.get_logger(__name__)


def run_steps(steps: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """Combine steps into one. A failing step does not stop the others. The exception is raised after the last step."""

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
    """Runs `step` repeatedly in a thread, for the first time at once. If `step` raises, the loop logs the exception
    with the message `failed`, and runs `step` again after a pause, which `wake` does not shorten.
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
        """Create a loop.

        name: the name of the thread.
        failed: the log line of a failure.
        failures: a counter of unexpected exceptions, labelled with the loop's name.
        expected: exceptions that are not bugs, which are logged as warnings.
        every: seconds between the end of a run and the next; None: runs only when woken.
        cap: the longest pause after a failure, in seconds.
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
        """Stop the loop; waits up to `timeout` seconds for the present run."""
        self.request_stop()
        if self._thread.is_alive():
            self._clock.join(self._thread, timeout)

    def request_stop(self) -> None:
        """Stop the loop without waiting for the present run."""
        self._stopping.set()
        self._wake.set()

    def wake(self) -> None:
        """Run `step` now. Any thread may call it."""
        self._wake.set()

    def run_within(self, seconds: float) -> None:
        """Make the next run start within this many seconds. To be called by `step`."""
        self._pause = seconds if self._pause is None else min(self._pause, seconds)

    def run_once(self) -> float | None:
        """Run `step` in the caller's thread. Returns the seconds to pause if it failed, else None."""
        self._wake.clear()
        self._pause = self._every
        try:
            self._step()
        except self._expected as error:
            delay = self._backoff.next_delay(getattr(error, "retry_after", None))
            _log.warning(self._failed, error=str(error), retry_in=round(delay, 1))
            return delay
        except Exception:  # noqa: BLE001 - the thread's outermost loop: logged, and it continues
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

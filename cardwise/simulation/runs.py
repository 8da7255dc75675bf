"""Spreads simulation runs over several processes. The results depend on the seeds only, not on the processes."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from typing import Any, Final, Protocol, TypeVar

from cardwise.simulation.fill import OnProgress
from cardwise.simulation.workload import SimulatedWorkload

_POLL_SECONDS: Final = 0.2  # seconds between two reports of progress
_R = TypeVar("_R")
_R_co = TypeVar("_R_co", covariant=True)


class Simulation(Protocol[_R_co]):
    """`fill` or `churn` with its settings. Must be picklable: a module-level function, or a `partial` of one."""

    def __call__(
        self, workload: SimulatedWorkload, policy: str, seed: int, *, on_progress: OnProgress | None = None
    ) -> _R_co: ...


@dataclass(frozen=True, slots=True)
class SimulationRun:
    """One simulation: a workload, by its index, under a policy, with a seed."""

    workload: int
    policy: str
    seed: int


def available_cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_all(
    simulate: Simulation[_R],
    workloads: Sequence[SimulatedWorkload],
    runs: Sequence[SimulationRun],
    *,
    processes: int = 1,
    on_progress: OnProgress = lambda _: None,
    on_run_done: Callable[[SimulationRun, _R], None] = lambda *_: None,
) -> list[_R]:
    """Run all simulations and return their results in the order of `runs`.

    processes: the maximum number of processes; with 1, the simulations run in this process.
    on_progress: called with the number of pods that arrived since the last call.
    on_run_done: called with each run and its result as soon as it is finished.
    """
    if min(processes, len(runs)) > 1:
        return _run_in_processes(
            simulate, workloads, runs, processes=processes, on_progress=on_progress, on_run_done=on_run_done
        )
    outcomes = []
    for run in runs:
        outcomes.append(simulate(workloads[run.workload], run.policy, run.seed, on_progress=on_progress))
        on_run_done(run, outcomes[-1])
    return outcomes


def _run_in_processes(
    simulate: Simulation[_R],
    workloads: Sequence[SimulatedWorkload],
    runs: Sequence[SimulationRun],
    *,
    processes: int,
    on_progress: OnProgress,
    on_run_done: Callable[[SimulationRun, _R], None],
) -> list[_R]:
    # Spawned, not forked: the calling process may have threads.
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    reported = 0
    pool = ProcessPoolExecutor(
        min(processes, len(runs)), context, initializer=_initialize_worker, initargs=(simulate, workloads, counter)
    )
    with pool:
        futures: list[Future[_R]] = [pool.submit(_simulate_in_worker, run) for run in runs]
        run_by_future = dict(zip(futures, runs, strict=True))
        waiting = set(futures)
        try:
            while waiting:
                ended, waiting = wait(waiting, _POLL_SECONDS, FIRST_COMPLETED)
                on_progress(counter.value - reported)
                reported = counter.value
                for future in futures:  # in the order of the runs, even if several end together
                    if future in ended:
                        on_run_done(run_by_future[future], future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


# The rest of this module runs in the worker processes.

_job: tuple[Simulation[object], Sequence[SimulatedWorkload], "Synchronized[int]"] | None = None


def _initialize_worker(
    simulate: Simulation[object], workloads: Sequence[SimulatedWorkload], counter: "Synchronized[int]"
) -> None:
    global _job  # noqa: PLW0603 - the job is passed to a worker process once, and not with each run
    _job = simulate, workloads, counter
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the worker at once, without a traceback


def _simulate_in_worker(run: SimulationRun) -> Any:
    if _job is None:
        raise AssertionError("a worker process starts with `_initialize_worker`")
    simulate, workloads, counter = _job

    def on_progress(pods: int) -> None:
        with counter.get_lock():
            counter.value += pods

    return simulate(workloads[run.workload], run.policy, run.seed, on_progress=on_progress)

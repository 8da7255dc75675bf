"""Many runs over several processes. What comes out depends on the seeds alone, not on how many processes there are."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from typing import Any, Final, Protocol, TypeVar

from cardwise.simulation.fill import Step
from cardwise.simulation.workload import SimulatedWorkload

_POLL: Final = 0.2  # seconds between two looks at the progress
_R = TypeVar("_R")
_R_co = TypeVar("_R_co", covariant=True)


class Simulate(Protocol[_R_co]):
    """`fill` or `churn` with its settings; picklable, so a function of a module or a `partial` of one."""

    def __call__(self, workload: SimulatedWorkload, policy: str, seed: int, *, step: Step | None = None) -> _R_co: ...


@dataclass(frozen=True, slots=True)
class Run:
    """A workload, by its number, under a policy."""

    workload: int
    policy: str
    seed: int


def processes() -> int:
    """As many as there are cores for this program."""
    return len(os.sched_getaffinity(0))


def run_all(
    simulate: Simulate[_R],
    workloads: Sequence[SimulatedWorkload],
    runs: Sequence[Run],
    *,
    processes: int = 1,
    step: Step = lambda _: None,
    done: Callable[[Run, _R], None] = lambda *_: None,
) -> list[_R]:
    """The results in the order of the runs; `done` is told of each as soon as it is there."""
    if min(processes, len(runs)) > 1:
        return _in_processes(simulate, workloads, runs, processes=processes, step=step, done=done)
    results = []
    for run in runs:
        results.append(simulate(workloads[run.workload], run.policy, run.seed, step=step))
        done(run, results[-1])
    return results


def _in_processes(
    simulate: Simulate[_R],
    workloads: Sequence[SimulatedWorkload],
    runs: Sequence[Run],
    *,
    processes: int,
    step: Step,
    done: Callable[[Run, _R], None],
) -> list[_R]:
    # Not forked: whoever calls may have threads.
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    told = 0
    pool = ProcessPoolExecutor(
        min(processes, len(runs)), context, initializer=_begin, initargs=(simulate, workloads, counter)
    )
    with pool:
        futures: list[Future[_R]] = [pool.submit(_one, run) for run in runs]
        of = dict(zip(futures, runs, strict=True))
        waiting = set(futures)
        try:
            while waiting:
                ended, waiting = wait(waiting, _POLL, FIRST_COMPLETED)
                step(counter.value - told)
                told = counter.value
                for future in futures:  # in their order, so that what is told at once is told in order
                    if future in ended:
                        done(of[future], future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


# In the other processes.

_job: tuple[Simulate[object], Sequence[SimulatedWorkload], "Synchronized[int]"] | None = None


def _begin(simulate: Simulate[object], workloads: Sequence[SimulatedWorkload], counter: "Synchronized[int]") -> None:
    global _job  # noqa: PLW0603 - a worker process has this one job, and its runs come without it
    _job = simulate, workloads, counter
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, and without a word


def _one(run: Run) -> Any:
    if _job is None:
        raise AssertionError("a worker process begins with `_begin`")
    simulate, workloads, counter = _job

    def step(pods: int) -> None:
        with counter.get_lock():
            counter.value += pods

    return simulate(workloads[run.workload], run.policy, run.seed, step=step)

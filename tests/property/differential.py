"""Executes the same histories with the extender of another commit and of this tree, and compares the bound pods.

`python -m tests.property.differential --base COMMIT` draws orderly histories: one thing at a time, and no faults. There
each pod must be bound to the same cards. `--faults` draws all histories of the black box: which thread comes first may
be otherwise there, so only a rule that is broken counts, and the rest is told. Histories that differ are kept as files,
made small, and `FILE…` plays such again.

The base plays with this tree's tests/property, beside its own builders and fakes. Where these do not fit together, it
plays with its own tests/property. So a base works if its own World has the steps of this tree: 98f46e08 and later
commits, until a step gets another name or parameter. Other bases are refused.
"""

import argparse
import contextlib
import importlib
import importlib.abc
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
KEPT = Path(".hypothesis/differential")
PARTS = ("cardwise", "extender", "tests")
MAX_HISTORIES = 10  # shown

History = list[dict[str, Any]]

# With which a base is tried: an extender binds a pod.
FIRST_HISTORY: History = [
    {"seed": 0, "nodes": {"n1": [16276]}},
    {"do": "starts", "extender": 0},
    {"do": "calm", "seconds": 60.0},
    {"do": "creates", "gpu_mem": 1024},
    {"do": "tries", "choice": 0, "to": 0},
]


class Told(NamedTuple):
    """The outcome of a history: by pod, the node and cards.

    broken: the broken rule; "" for none."""

    bound: dict[str, str]
    broken: str


def played(history: History) -> Told:
    from tests.property import blackbox

    first, *steps = history
    world = blackbox.World(**first)
    broken = None
    try:
        with world.open():
            for step in steps:
                world.do(**step)
    except Exception as error:  # noqa: BLE001 - of whatever is wrong
        broken = error
    return trace_of(world, text(broken))


def trace_of(world: Any, broken: str) -> Told:
    bound = {
        binding.pod: f"{binding.node} "
        + " ".join(f"{share.index}:{share.mem}:{share.core}" for share in binding.shares)
        for binding in world.bound_pods
    }
    return Told(bound, broken)


class Base:
    """A process with the extender of another commit."""

    def __init__(self, commit: str, folder: Path) -> None:
        self._folder = folder
        for own in (False, True):
            files = subprocess.run(["git", "archive", commit, *PARTS], cwd=ROOT, capture_output=True, check=True)
            shutil.rmtree(folder / "tests", ignore_errors=True)
            subprocess.run(["tar", "x"], cwd=folder, input=files.stdout, check=True)
            if not own:
                # Only what a history means is of this tree: builders and fakes fit their commit.
                shutil.copytree(ROOT / "tests/property", folder / "tests/property", dirs_exist_ok=True)
            self._start()
            problem = self._problem_of_playing()
            if not problem:
                if own:
                    print(f"{commit} plays with its own tests/property", file=sys.stderr)
                return
            self.close()
        sys.exit(f"{commit} cannot play the histories of this tree: {problem}")

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[0] = '.'; from {__spec__.name} import serve; serve()"],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": str(self._folder), "PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _problem_of_playing(self) -> str:
        """Why the base cannot execute a first history; "" if it can."""
        try:
            outcome = self.played(FIRST_HISTORY)
        except (OSError, ValueError):
            return "its tests/property does not start"
        return outcome.broken or ("" if outcome.bound else "no pod is bound")

    def begin(self, history: History) -> None:
        print(json.dumps(history), file=self._process.stdin, flush=True)

    def end(self) -> Told:
        """The outcome of the oldest history that was started and not ended."""
        return Told(*json.loads(self._process.stdout.readline()))

    def played(self, history: History) -> Told:
        self.begin(history)
        return self.end()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def serve() -> None:
    """Execute the history of each line, and print its outcome."""
    sys.meta_path.append(_Moved())
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(played(json.loads(line))), file=out, flush=True)


class _Moved(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module at its path before it was moved into a package: `cardwise.core.names` for
    `cardwise.core.api.names`.
    """

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        parts = name.split(".")
        if parts[0] not in PARTS or len(parts) < 3:
            return None
        former = Path(*parts[:-2], f"{parts[-1]}.py")
        if former.exists():
            return importlib.util.spec_from_loader(name, self, origin=".".join([*parts[:-2], parts[-1]]))
        # A package that does not exist yet.
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return importlib.import_module(spec.origin) if spec.origin else None

    def exec_module(self, module: Any) -> None:
        pass


def draw(machine: Any, examples: int, seed: int, visit: Callable[[History, Told], object]) -> None:
    """Draw histories of the machine, with the outcomes of this tree's extender."""
    import hypothesis
    from hypothesis.stateful import run_state_machine_as_test

    remaining = examples

    class Kept(machine):  # type: ignore[misc]
        def teardown(self) -> None:
            nonlocal remaining
            with contextlib.suppress(Exception):  # the world knows it
                super().teardown()
            if hasattr(self, "world"):
                remaining -= 1
                visit(self.world.history, trace_of(self.world, text(self.world.broken)))

    while remaining > 0:  # Hypothesis ends where a rule is broken
        run_settings = hypothesis.settings(
            max_examples=remaining,
            phases=[hypothesis.Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            stateful_step_count=30,
        )
        with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(Exception):
            run_state_machine_as_test(hypothesis.seed(f"{seed}/{remaining}")(Kept), settings=run_settings)


def text(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0] if error is not None else ""


def differs(before: Told, now: Told, *, strict: bool) -> str:
    """The difference of the outcomes; "" if there is none."""
    if now.broken:
        return f"a rule is broken{' as before' if before.broken else ''}: {now.broken}"
    if before.broken:
        return f"a rule was broken: {before.broken}"
    pods = before.bound.keys() ^ now.bound.keys()
    if pods:
        return "other pods are bound" if strict else "(other pods are bound)"
    if before.bound != now.bound:
        return "other cards" if strict else "(other cards)"
    return ""


def table(before: Told, now: Told) -> Iterator[str]:
    for pod in sorted(before.bound.keys() | now.bound.keys(), key=lambda pod: (len(pod), pod)):
        was, is_ = before.bound.get(pod, "-"), now.bound.get(pod, "-")
        if was != is_:
            yield f"    {pod}: {was} -> {is_}"


def main() -> int:
    from tests.property import replay
    from tests.property.test_blackbox import Machine, Orderly

    parser = argparse.ArgumentParser(prog="python -m tests.property.differential", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="histories to play, in place of new ones")
    parser.add_argument("--base", required=True, metavar="COMMIT")
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", action="store_true", help="with faults, several threads and scenes")
    args = parser.parse_args()
    strict = not args.faults
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        base = Base(args.base, Path(folder))
        waiting: list[tuple[History, Told]] = []
        different: list[tuple[History, str]] = []

        def compare() -> None:
            history, now = waiting.pop(0)
            difference = differs(base.end(), now, strict=strict)
            counts[difference.split(":")[0] or "the same"] += 1
            if difference and not difference.startswith("("):
                different.append((history, difference.split(":")[0]))

        def each(history: History, now: Told) -> None:
            base.begin(history)
            waiting.append((history, now))
            if len(waiting) > 1:  # the other process plays one while this one draws the next
                compare()

        for history in map(replay.read, args.files):
            each(history, played(history))
        if not args.files:
            draw(Machine if args.faults else Orderly, args.examples, args.seed, each)
        while waiting:
            compare()
        for difference, count in counts.most_common():
            print(f"{count:5} {difference}")
        for number, (history, difference) in enumerate(different[:MAX_HISTORIES], 1):
            small = history if args.files else replay.less(history, _still(base, difference, strict=strict))
            before, now = base.played(small), played(small)
            path = args.files[0] if args.files else KEPT / f"{number}.jsonl"
            replay.write(path, small)
            print(f"{path}: {len(small) - 1} steps: {differs(before, now, strict=strict)}")
            print("\n".join(table(before, now)))
        base.close()
    return 1 if different else 0


def _still(base: Base, kind: str, *, strict: bool) -> Callable[[History], bool]:
    def still(history: History) -> bool:
        base.begin(history)
        now = played(history)
        return differs(base.end(), now, strict=strict).split(":")[0] == kind

    return still


if __name__ == "__main__":
    from tests.property.replay import in_order

    in_order("tests.property.differential")
    sys.exit(main())

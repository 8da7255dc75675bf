"""Planted faults that the black box must find: extenders whose input or output is changed. They do not depend on the
internals of an extender. The faults of the commit do: each leaves out one check of `extender.cache.commit`, and the
judge of `gangcommit` must find it.

`python -m tests.property.planted` draws histories until each fault was found, and prints after how many. With `--keep`,
the history that shows a fault is shrunk and saved as a file.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis.stateful import run_state_machine_as_test
from prometheus_client import CollectorRegistry

from cardwise.clock import Clock
from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from cardwise.kube.client import KubeClient
from cardwise.runtime.http.httpcalls import WsgiApp
from extender.cache import commit
from extender.process import ExtenderSettings
from tests.fakes.apidoors import InMemoryClient
from tests.fakes.apiobjects import encoded, merged, status
from tests.fakes.apiserver import Answer, Request
from tests.property import gangcommit, replay
from tests.property.blackbox import Build, History, Whole, today

HISTORIES = Path(".hypothesis/planted")

Seen = Callable[[Json], Json | None]  # what an extender sees of an object; None: nothing
Sends = Callable[["_Between", Request], Answer]  # what becomes of a request of an extender


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A planted fault.

    sees: by collection, how the extender sees objects.
    filters: how it sees the pod of a filter call.
    settings: changed settings."""

    sees: dict[str, Seen] = dataclasses.field(default_factory=dict)
    sends: Sends | None = None
    filters: Seen | None = None  # the pod of a call of filter
    settings: Json = dataclasses.field(default_factory=dict)

    def build(self) -> Build:
        def make_extender(client: KubeClient, clock: Clock, settings: ExtenderSettings) -> Whole:
            assert isinstance(client, InMemoryClient)
            between = _Between(client, self)
            return _Whole(today(between, clock, dataclasses.replace(settings, **self.settings)), self)

        return make_extender


class _Between(InMemoryClient):
    """The client of an extender with a fault."""

    def __init__(self, client: InMemoryClient, fault: Fault) -> None:
        super().__init__(client.api, **client.settings)
        self._fault = fault
        self.lists: dict[str, Answer] = {}  # the first of each collection

    def handle(self, request: Request) -> Answer:
        sends = self._fault.sends
        answer = sends(self, request) if sends is not None else self.api.handle(request)
        seen = next((seen for path, seen in self._fault.sees.items() if request.path.startswith(path)), None)
        if seen is None or request.verb not in ("get", "list", "watch") or answer.status != 200:
            return answer
        if answer.stream is not None:
            return dataclasses.replace(answer, stream=_Stream(answer.stream, seen))
        body = json.loads(answer.body)
        if "items" in body:
            body["items"] = [manifest for manifest in map(seen, body["items"]) if manifest is not None]
        else:
            body = seen(body) or body
        return dataclasses.replace(answer, body=encoded(body))


class _Stream:
    """A watch with changed objects."""

    def __init__(self, stream: Any, seen: Seen) -> None:
        self.__dict__["_stream"], self.__dict__["_seen"] = stream, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __setattr__(self, name: str, attribute: Any) -> None:
        setattr(self._stream, name, attribute)

    def __iter__(self) -> Iterator[bytes]:
        line = b""
        for part in self._stream:
            line += part
            if line.endswith(b"\n"):
                event = json.loads(line)
                line = b""
                if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                    event["object"] = self._seen(event["object"])
                if event["object"] is not None:
                    yield encoded(event) + b"\n"


class _Whole:
    """An extender that sees changed pods in filter calls."""

    def __init__(self, whole: Whole, fault: Fault) -> None:
        self._whole = whole
        self._seen = fault.filters
        self.start, self.begin_stop, self.stop = whole.start, whole.begin_stop, whole.stop

    def app(self, registry: CollectorRegistry) -> WsgiApp:
        app = self._whole.app(registry)

        def called(environ: Any, begin: Any) -> Any:
            if self._seen is not None and environ["PATH_INFO"].endswith("/filter"):
                args = json.loads(environ["wsgi.input"].read())
                body = encoded(args | {"Pod": self._seen(args["Pod"])})
                environ |= {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
            return app(environ, begin)

        return called


# What is seen.


def _nothing(_: Json) -> None:
    return None


def _with(**change: Any) -> Seen:
    return lambda manifest: merged(manifest, change)


def _ended_when_deleted(pod: Json) -> Json:
    return merged(pod, {"status": {"phase": "Succeeded"}}) if pod["metadata"].get("deletionTimestamp") else pod


def _one_more(quota: Json) -> Json:
    hard = [
        {name: amount + 1 if name in ("shares", "gpus") else amount for name, amount in entry.items()}
        for entry in quota["spec"]["hard"]
    ]
    return merged(quota, {"spec": {"hard": hard}})


def _alone(pod: Json) -> Json:
    """Remove the pod from its gang."""
    return merged(pod, {"metadata": {"labels": {names.GANG: None}}})


def _not_whole(pod: Json) -> Json:
    """Report a part of a whole card as free."""
    document = json.loads((pod["metadata"].get("annotations") or {}).get(names.ASSIGNMENT, "null"))
    if document is None:
        return pod
    for shares in document["containers"].values():
        for share in shares:
            if share[5:] == [1]:
                share[2:] = [share[2] // 2, 0, share[4]]
    return merged(pod, {"metadata": {"annotations": {names.ASSIGNMENT: json.dumps(document)}}})


# What is sent.


def _takes_lost_for_refused(between: _Between, request: Request) -> Answer:
    try:
        return between.api.handle(request)
    except OSError:
        if not request.path.endswith("/binding"):
            raise
        return Answer(403, encoded(status(403, "no")))


def _takes_bound_for_refused(between: _Between, request: Request) -> Answer:
    answer = between.api.handle(request)
    if request.path.endswith("/binding") and answer.status < 300:
        return Answer(403, encoded(status(403, "no")))
    return answer


def _makes_nothing_void(between: _Between, request: Request) -> Answer:
    if request.verb == "patch" and names.LEADER_EPOCH in request.raw.decode():
        return between.api.handle(dataclasses.replace(request, verb="get", body=None, raw=b""))
    return between.api.handle(request)


def _binds_whatever_has_changed(between: _Between, request: Request) -> Answer:
    """Bind with any epoch, and any version of the pod."""
    if not request.path.endswith("/binding"):
        return between.api.handle(request)
    body = merged(request.body, {"metadata": {"resourceVersion": None}})
    return between.api.handle(dataclasses.replace(request, body=body, raw=encoded(body)))


def _has_a_lease_of_its_own(between: _Between, request: Request) -> Answer:
    path = request.path
    if "/leases" not in path:
        return between.api.handle(request)
    own = "of-" + between.settings["user_agent"]
    if path.endswith("/leases"):
        body = merged(request.body, {"metadata": {"name": own}})
        return between.api.handle(dataclasses.replace(request, body=body, raw=encoded(body)))
    return between.api.handle(dataclasses.replace(request, path=path.rsplit("/", 1)[0] + "/" + own))


def _takes_over_by_an_old_list(between: _Between, request: Request) -> Answer:
    if request.verb != "list" or request.path != paths.pods():
        return between.api.handle(request)
    if request.path not in between.lists:
        between.lists[request.path] = between.api.handle(request)
    return between.lists[request.path]


def _of_one(group: Json) -> Json:
    return merged(group, {"spec": {"minMember": 1}})


def _of_any_class(quota: Json) -> Json:
    hard = [entry for entry in quota["spec"]["hard"] if "class" not in entry] or [{"shares": 99}]
    return merged(quota, {"spec": {"hard": hard}})


FAULTS = {
    "a Binding whose answer was lost is forgotten": Fault(sends=_takes_lost_for_refused),
    "an accepted Binding is forgotten until the watch shows it": Fault(sends=_takes_bound_for_refused),
    "what vanished pods hold is free at once": Fault(settings={"terminating_seconds": 0.0}),
    "a share is free when deletion begins": Fault(sees={paths.pods(): _ended_when_deleted}),
    "what nodes report of vanished pods is not counted": Fault(
        sees={paths.extendedresources(): _with(status={"reported": [], "terminating": []})}
    ),
    "quotas are not known": Fault(sees={paths.gpuquotas(): _nothing}),
    "a quota is exceeded by one": Fault(sees={paths.gpuquotas(): _one_more}),
    "the cores of a card are given twice": Fault(settings={"core_overcommit": 200}),
    "a sick card takes new pods": Fault(sees={paths.extendedresources(): _with(status={"health": "Healthy"})}),
    "a cordoned card takes new pods": Fault(sees={paths.extendedresources(): _with(spec={"unschedulable": None})}),
    "a whole card takes shares": Fault(sees={paths.pods(): _not_whole}),
    "members of gangs are bound one by one": Fault(sees={paths.pods(): _alone}, filters=_alone),
    "a lower pod takes what others were evicted for": Fault(filters=_with(spec={"priority": 1000})),
    "Bindings of former epochs are not made void": Fault(sends=_makes_nothing_void),
    "a Binding lands whatever has become of its pod": Fault(sends=_binds_whatever_has_changed),
    "a class has cards of other models": Fault(
        sees={paths.resourceclasses(): _with(spec={"selector": {"matchExpressions": []}})}
    ),
    "a quota of a class is not known": Fault(sees={paths.gpuquotas(): _of_any_class}),
    "a card without MPS takes pods that want it": Fault(sees={paths.extendedresources(): _with(status={"mps": None})}),
    "a PodGroup says nothing": Fault(sees={paths.podgroups(): _of_one}),
    "disruption budgets are not known": Fault(sees={paths.poddisruptionbudgets(): _nothing}),
    "two lead at once": Fault(sends=_has_a_lease_of_its_own),
    "an epoch begins with an old list": Fault(sends=_takes_over_by_an_old_list),
}


def search(fault: Fault, limit: int, machine: Any, seed: int = 0) -> tuple[int, History]:
    """The number of examples after which the fault is found, and the history; 0 if it is not found."""
    drawn: list[Any] = []

    class Planted(machine):  # type: ignore[misc]
        build = staticmethod(fault.build())

        def __init__(self) -> None:
            super().__init__()
            drawn.append(self)

    run_settings = hypothesis.settings(
        max_examples=limit,
        phases=[hypothesis.Phase.generate],
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(AssertionError):
        run_state_machine_as_test(hypothesis.seed(seed)(Planted), settings=run_settings)
    for number, example in enumerate(drawn, 1):
        if example.world.broken is not None:
            return number, example.world.history
    return 0, []


def main() -> int:
    from tests.property.test_blackbox import Machine

    parser = argparse.ArgumentParser(prog="python -m tests.property.planted", description=__doc__)
    parser.add_argument("faults", nargs="*", help="words of them; all faults without")
    parser.add_argument("--examples", type=int, default=30, help="of which one must find the fault (default: 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="make histories of what is found")
    args = parser.parse_args()
    missed = 0
    for name, fault in FAULTS.items():
        if args.faults and not any(word in name for word in args.faults):
            continue
        number, history = search(fault, args.examples, Machine, args.seed)
        missed += not number
        print(f"{name}: {f'after {number}' if number else 'not found'}", flush=True)
        if number and args.keep:
            small = replay.shrunk(history, fault.build())
            replay.write(HISTORIES / f"{name.replace(' ', '-')}.jsonl", small)
            print(f"  {replay.broken(small, fault.build())}")
    for check in commit.CHECKS:
        name = f"the commit of a gang does not check: {check}"
        if not args.faults or any(word in name for word in args.faults):
            number = gangcommit.search(check, 20 * args.examples, args.seed)
            missed += not number
            print(f"{name}: {f'after {number}' if number else 'not found'}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    replay.in_order("tests.property.planted")
    sys.exit(main())

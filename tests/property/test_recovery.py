"""However the calls of several loops fail and succeed, none makes more calls than its own back-off allows."""

import json
from itertools import cycle

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cardwise.kube import paths
from cardwise.kube.watch.reflector import CENTRAL_PACE, Reflector, WakeHandler
from tests.fakes.apiserver import ApiServer, Fault
from tests.fakes.clock import FakeClock

COLLECTIONS = [paths.pods(), paths.nodes(), paths.extendedresources(), paths.resourceclasses()]
SECONDS = 60.0
LIST_FAULTS = {"ok": Fault(), "500": Fault(status=500), "refused": Fault(refused=True)}
WATCH_FAULTS = {
    "cut": Fault(then="cut"),
    "end": Fault(then="end"),
    "gone": Fault(then="gone"),
    "400": Fault(status=400),
    "500": Fault(status=500),
}
ANSWERS = st.tuples(st.sampled_from(sorted(LIST_FAULTS)), st.sampled_from(sorted(WATCH_FAULTS)))
PATTERN = st.lists(ANSWERS, min_size=1, max_size=4)


def most_tries(seconds: float) -> int:
    """The tries in that time if the back-off draws the shortest pauses, which are half the longest ones, and one more
    that `retry` may have brought forward.
    """
    tries, delay = 2, CENTRAL_PACE.backoff_initial
    while seconds > 0:
        seconds -= delay / 2
        delay = min(2 * delay, CENTRAL_PACE.backoff_cap)
        tries += 1
    return tries


def project(raw: bytes) -> tuple[str, int]:
    return json.loads(raw)["metadata"]["name"], 1


@settings(max_examples=8, deadline=None)
@example([[("ok", "cut")]] * 4)
@example([[("ok", "400")]] * 4)
@example([[("ok", "400"), ("500", "500")]] * 4)
@given(st.lists(PATTERN, min_size=2, max_size=len(COLLECTIONS)))
def test_loops_that_wake_each_other_make_no_more_calls_than_their_back_off_allows(
    patterns: list[list[tuple[str, str]]],
) -> None:
    clock = FakeClock()
    api = ApiServer(clock)
    client = api.client(clock=clock)
    for collection, pattern in zip(COLLECTIONS, patterns, strict=False):
        api.write_object(collection, {"metadata": {"name": "x"}})
        for (of_list, of_watch), _ in zip(cycle(pattern), range(400)):
            api.fault(LIST_FAULTS[of_list], "list", collection)
            api.fault(WATCH_FAULTS[of_watch], "watch", collection)
    loops = [
        Reflector(client, path, project, WakeHandler(), pace=CENTRAL_PACE, clock=clock)
        for path in COLLECTIONS[: len(patterns)]
    ]
    try:
        for loop in loops:
            loop.start()
        start = clock.now()
        clock.step_until(lambda: clock.now() - start >= SECONDS, threads=len(loops))
        for collection in COLLECTIONS[: len(patterns)]:
            assert max(len(api.sent(verb, collection)) for verb in ("list", "watch")) <= most_tries(SECONDS)
    finally:
        api.down = True
        for loop in loops:
            loop.stop()
        api.close()

"""The audit reports exactly the pods that exceed their shares, whatever is known of their containers."""

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from cardwise.core.values.quantity import MiB
from mps.audit import findings
from mps.audit.findings import PodGrant, ProcessUse, Reason, Violation

TOLERANCE = MiB(512)
CARDS = ["GPU-0", "GPU-1"]
KEYS = ["0", "1", "init-0"]


@st.composite
def pods(draw) -> dict[str, PodGrant]:
    """Pods with some shares, whose containers the runtime knows as <pod>/<key>."""
    places = st.tuples(st.sampled_from(KEYS), st.sampled_from(CARDS))
    shares = st.dictionaries(places, st.integers(1, 4000).map(MiB), max_size=4)
    return {
        uid: PodGrant(draw(shares), {f"{uid}/{key}": key for key in KEYS})
        for uid in draw(st.sets(st.sampled_from("abc")))
    }


uses = st.lists(
    st.builds(
        lambda card, memory, pod, key: ProcessUse(card=card, pid=0, memory=memory, pod=pod, container=f"{pod}/{key}"),
        st.sampled_from(CARDS),
        st.none() | st.integers(0, 5000).map(MiB),
        st.sampled_from(["a", "b", "c", ""]),
        st.sampled_from(KEYS),
    ),
    max_size=8,
).map(lambda process_uses: [replace(use, pid=pid) for pid, use in enumerate(process_uses, 1)])


@example(
    [
        ProcessUse(card="GPU-0", pid=1, pod="a", container="a/0"),
        ProcessUse(card="GPU-0", pid=2, memory=MiB(514), pod="a", container="a/0"),
    ],
    {"a": PodGrant({("0", "GPU-0"): MiB(1)}, {"a/0": "0"})},
)
@given(uses, pods())
def test_each_process_is_in_a_finding_exactly_when_something_is_wrong_with_it(process_uses, grants):
    reported = findings.find_violations(process_uses, grants, TOLERANCE)
    accused: dict[int, Violation] = {}
    for finding in reported:
        for pid in finding.pids:
            assert pid not in accused, "once"
            accused[pid] = finding
    for use in process_uses:
        finding = accused.get(use.pid)
        if use.pod not in grants:
            assert finding is not None
            assert finding.reason is Reason.UNKNOWN_PROCESS
            continue
        key = grants[use.pod].keys[use.container]
        share = grants[use.pod].shares.get((key, use.card))
        theirs = [
            other.memory or 0
            for other in process_uses
            if (other.card, other.pod, other.container) == (use.card, use.pod, use.container)
        ]
        if share is not None:
            assert (finding is not None) == (sum(theirs) > share + TOLERANCE * len(theirs))
            assert finding is None or finding.reason is Reason.MEMORY_OVERRUN
        else:
            assert finding is not None
            elsewhere = any(holder == key for holder, _ in grants[use.pod].shares)
            assert finding.reason is (Reason.WRONG_GPU if elsewhere else Reason.GPU_WITHOUT_GRANT)


@given(uses, pods(), st.randoms())
def test_the_order_in_which_a_driver_lists_processes_means_nothing(process_uses, grants, random):
    shuffled = random.sample(process_uses, len(process_uses))
    assert findings.find_violations(shuffled, grants, TOLERANCE) == findings.find_violations(
        process_uses, grants, TOLERANCE
    )


@given(uses, pods(), st.sets(st.sampled_from(KEYS)))
def test_an_unknown_process_owner_reports_no_further_pod(process_uses, grants, unknown):
    known = {(finding.pod, finding.card) for finding in findings.find_violations(process_uses, grants, TOLERANCE)}
    blurred = {
        uid: replace(grant, keys={run: key for run, key in grant.keys.items() if key not in unknown})
        for uid, grant in grants.items()
    }
    for finding in findings.find_violations(process_uses, blurred, TOLERANCE):
        assert (finding.pod, finding.card) in known


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 4), st.integers(1, 5))
def test_it_speaks_after_so_many_looks_in_a_row_and_then_now_and_again(overruns, looks, every):
    finding = Violation(reason=Reason.MEMORY_OVERRUN, card="GPU-0", pids=(7,), pod="a")
    standing: dict = {}
    row = 0
    for at, is_over in enumerate(overruns):
        standing = findings.update_standing_violations(standing, [finding] if is_over else [], float(at))
        row = row + 1 if is_over else 0
        assert len(standing) == bool(row)
        for streak in standing.values():
            assert (streak.passes, streak.since) == (row, at - row + 1)
            assert streak.is_report_due(looks, every) == (row >= looks and (row - looks) % every == 0)
            stranger = replace(streak, violation=replace(finding, reason=Reason.UNKNOWN_PROCESS))
            assert stranger.is_report_due(looks, every) == (row == looks)


@given(st.integers(0, 3))
def test_a_card_that_was_not_seen_stands_as_it_did(before):
    finding = Violation(reason=Reason.WRONG_GPU, card="GPU-0", pids=(7,), pod="a")
    standing: dict = {}
    for at in range(before):
        standing = findings.update_standing_violations(standing, [finding], float(at))
    assert findings.update_standing_violations(standing, [], 9.0, unreadable_cards={"GPU-0"}) == standing
    assert findings.update_standing_violations(standing, [], 9.0, unreadable_cards={"GPU-1"}) == {}

"""The rules of the audit, as values."""

from cardwise.core.values.quantity import MiB
from mps.audit.findings import PodGrant, ProcessUse, Reason, find_violations
from tests.theory import theory_of


def test_the_example_of_the_docstring():
    theory, share, used, tolerance = theory_of("mps.audit.findings"), 4096, (2800, 2700), 640
    pods = {"pod": PodGrant({("0", "GPU-0"): MiB(share)}, {"id": "0"})}

    def violations_of(*amounts: int) -> list[tuple[Reason, int]]:
        """The violations of a container with processes that use so many MiB."""
        uses = [
            ProcessUse(card="GPU-0", pid=pid, memory=MiB(amount), pod="pod", container="id")
            for pid, amount in enumerate(amounts, 1)
        ]
        return [(violation.reason, violation.used) for violation in find_violations(uses, pods, MiB(tolerance))]

    assert f"a container with a share of {share} MiB has two processes of {used[0]} and {used[1]} MiB" in theory
    assert f"The tolerance is {tolerance} MiB for each process" in theory
    ((reason, total),) = violations_of(*used)
    allowed = share + 2 * tolerance
    sums = f"It uses {total} MiB, and {share} + 2 * {tolerance} = {allowed} MiB are allowed: a {reason.value}."
    assert sums in theory
    assert violations_of(used[0], allowed - used[0]) == []
    assert violations_of(used[0], allowed - used[0] + 1) == [(Reason.MEMORY_OVERRUN, allowed + 1)]

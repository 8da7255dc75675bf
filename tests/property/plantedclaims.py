"""Planted faults of scheduler.mode=claims, and the tests that must find each of them.

`python -m tests.property.plantedclaims` runs pytest once for each fault, with this module as a plugin: it replaces one
function of the product, and a test must fail.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any, Final, NamedTuple
from unittest import mock

import pytest

from cardwise.core.api import claims
from cardwise.core.values.decoded import Json
from extender.binding.claimwriter import ClaimGrant, ClaimVersion, ClaimWriter, PreparedGrant
from extender.cache.claimed import ClaimedPods
from extender.cache.quotas import Quotas
from extender.claims.takeback import ClaimTakeBack
from extender.records.podref import PodRef

VARIABLE: Final = "CARDWISE_PLANTED_FAULT"
_NO_FAILURE: Final = 0
_SOME_FAILED: Final = 1  # exit statuses of pytest

SCHEDULER, WRITER = "tests/extender/claims/test_claimscheduler.py", "tests/extender/binding/test_claimwriter.py"
NODE, FORMAT = "tests/deviceplugin/grants/test_claims.py", "tests/core/api/test_claims.py"


class Planted(NamedTuple):
    """A fault: the function `name` of `owner` is replaced. `tests`: the arguments of pytest; one test must fail."""

    owner: Any
    name: str
    replacement: Any
    tests: tuple[str, ...]

    def patch(self) -> Any:
        return mock.patch.object(self.owner, self.name, self.replacement)


def _read_pod(self: ClaimTakeBack, pod: PodRef) -> Json | None:
    return self._writer.read_pod(pod)


def _open_gate_first(self: ClaimWriter, grant: ClaimGrant, deadline: float) -> PreparedGrant:
    if grant.gated:
        self._write_pod(grant, None, deadline)
        return PreparedGrant(replace(grant, gated=False), self._nominate(replace(grant, gated=False), deadline))
    return _prepare(self, grant, deadline)


def _open_gate_before_allocation(self: ClaimWriter, grant: ClaimGrant, deadline: float) -> PreparedGrant:
    pod = self._nominate(grant, deadline)
    self._write_pod(grant, pod, deadline)
    return PreparedGrant(replace(grant, gated=False), pod)


def _without_node(*args: Any) -> Json:
    status = _new_status(*args)
    del status["allocation"]["nodeSelector"]
    return status


def _ignore_reservation(claim: Json, status: Json, allocation: Json) -> Any:
    owner = claim["metadata"]["ownerReferences"][0]
    reserved = [{"resource": "pods", "name": owner["name"], "uid": owner["uid"]}]
    return _decode_allocation(claim, status | {"reservedFor": reserved}, allocation)


_prepare, _new_status, _decode_allocation = ClaimWriter.prepare, claims.new_status, claims._decode_allocation

FAULTS: Final[dict[str, Planted]] = {
    "a new leader does not fence pods": Planted(ClaimTakeBack, "_fence_pod", _read_pod, (SCHEDULER, "-k", "gate")),
    "a gate is opened before the node is nominated": Planted(ClaimWriter, "prepare", _open_gate_first, (WRITER,)),
    "a gate is opened before the claim is allocated": Planted(
        ClaimWriter, "prepare", _open_gate_before_allocation, (WRITER,)
    ),
    "an allocation names no node": Planted(claims, "new_status", _without_node, (FORMAT,)),
    "a claim is deleted in any version": Planted(
        ClaimVersion, "delete_options", property(lambda claim: {"preconditions": {"uid": claim.uid}}), (WRITER,)
    ),
    "the node does not check for which pod a claim is reserved": Planted(
        claims, "_decode_allocation", _ignore_reservation, (NODE,)
    ),
    "quotas are not charged": Planted(Quotas, "headroom", lambda *_: [], (SCHEDULER, "-k", "quota")),
    "each member of a gang is taken back for itself": Planted(
        ClaimedPods, "gang_uids", lambda *_: [], (SCHEDULER, "-k", "gang")
    ),
}


def pytest_configure(config: pytest.Config) -> None:
    """Plant the fault that the environment names."""
    patch = FAULTS[os.environ[VARIABLE]].patch()
    patch.start()
    config.add_cleanup(patch.stop)


def has_failing_test(fault: str) -> bool:
    """Whether a test fails with the fault."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:randomly", "-p", __spec__.name]
    done = subprocess.run(
        [*command, *FAULTS[fault].tests],
        env={**os.environ, VARIABLE: fault},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (_NO_FAILURE, _SOME_FAILED):
        raise RuntimeError(f"pytest did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == _SOME_FAILED


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.property.plantedclaims", description=__doc__)
    parser.add_argument("faults", nargs="*", help="words of them; all faults without")
    words = parser.parse_args().faults
    missed = 0
    for fault in [fault for fault in FAULTS if not words or any(word in fault for word in words)]:
        has_failed = has_failing_test(fault)
        missed += not has_failed
        print(f"{fault}: {'found' if has_failed else 'not found'}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

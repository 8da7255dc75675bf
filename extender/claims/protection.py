"""Checks that the chart's admission policies protect claims: at the extender's start, and before each leader epoch.

Without them users can name and change the claims of others.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from cardwise.core.api import admissionpolicies, claims
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from extender.leadership.fence import run_in_parallel

_TIMEOUT: Final = 2.0
_PARALLEL: Final = 8
_REMEDY: Final = (
    "let the chart recreate them (scheduler.mode=claims, policies.enabled=true); `cardwise doctor` has the commands"
)


def find_problem(client: KubeClient) -> str | None:
    """Which policies do not protect claims, with the remedy; None if all do.

    Raises KubeError if the API server does not answer.
    """
    problems = [problem for problem in run_in_parallel(partial(_check, client), claims.POLICIES, _PARALLEL) if problem]
    if not problems:
        return None
    return f"users could name and change the claims of others: {'; '.join(problems)}; {_REMEDY}"


def _check(client: KubeClient, name: str) -> str | None:
    def read(path: str) -> Json:
        return client.get(path, timeout=_TIMEOUT)

    checks: list[tuple[str, str, Callable[[Json], bool], str]] = [
        (
            "ValidatingAdmissionPolicy",
            paths.validatingadmissionpolicies(name),
            admissionpolicies.is_complete,
            "has another failurePolicy than Fail, or leaves objects out",
        ),
        (
            "ValidatingAdmissionPolicyBinding",
            paths.validatingadmissionpolicybindings(name),
            lambda binding: admissionpolicies.enforced_policy(binding) == name,
            "does not deny, leaves objects out, or names another policy",
        ),
    ]
    for kind, path, is_sound, fault in checks:
        try:
            if not is_sound(read(path)):
                return f"{kind} {name} {fault}"
        except errors.NotFound:
            return f"{kind} {name} is missing"
        except errors.Forbidden:
            return f"{kind} {name} may not be read by the extender"
    return None

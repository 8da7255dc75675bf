"""Turns a Forbidden error into the right that is missing and the command by which an administrator gives it."""

import re
from typing import TYPE_CHECKING

from cardwise.core.api import names

if TYPE_CHECKING:
    from cardwise.kube import errors

_DENIED = re.compile(
    r'User "(?P<user>[^"]+)" cannot (?P<verb>[a-z]+) resource "(?P<resource>[^"]+)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]+)")?'
)
_READS = ("get", "list", "watch")
_CORDONS = "cardwise-drain"
# What commands that change something need, reading too.
_ROLES = {"cordon": _CORDONS, "uncordon": _CORDONS, "drain": _CORDONS, "defrag": "cardwise-defrag"}
_EVERYBODY = "kubectl create clusterrolebinding cardwise-view --clusterrole=cardwise-view --group=system:authenticated"


def missing(error: "errors.Forbidden", command: str = "") -> str:
    """Which right is missing, in our words where the API server's say it, and how it is given.

    `command`: the one that ran; where one role has all that it needs, that role.
    """
    found = _DENIED.search(error.message)
    user, namespace = (found["user"], found["namespace"]) if found is not None else ("USER", None)
    ours = found is not None and found["group"] == names.GROUP
    writes = found is not None and found["verb"] not in _READS
    if found is None:
        lacking = error.message
    else:
        where = f"namespace {namespace}" if namespace else "the whole cluster"
        lacking = f"the right to {found['verb']} {found['resource']} in {where} is missing"
    if command in _ROLES:
        bound = _bound(_CORDONS if writes and ours else _ROLES[command], user)
    elif writes:
        bound = _bound(_CORDONS, user)  # of commands that look none writes
    elif namespace:
        bound = _bound("cardwise-view" if ours else "view", user, namespace)
    elif ours or found is None:
        return f"{lacking}; an administrator gives it to everybody by: {_EVERYBODY}"
    else:
        bound = _bound("cardwise-inspect", user)
    return f"{lacking}; an administrator gives it by: {bound}"


def _bound(role: str, user: str, namespace: str = "") -> str:
    binding = f"rolebinding {role} -n {namespace}" if namespace else f"clusterrolebinding {role}"
    return f"kubectl create {binding} --clusterrole={role} --user={user}"

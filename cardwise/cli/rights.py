"""Turns a Forbidden error into the missing right, the role that grants it, and the command that binds the role."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cardwise.core.api import names
from cardwise.core.values import shellcommand

if TYPE_CHECKING:
    from cardwise.kube import errors

_DENIAL_PATTERN: Final = re.compile(
    r'User "(?P<user>[^"]+)" cannot (?P<verb>[a-z]+) resource "(?P<resource>[^"]+)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]+)")?'
)
_READ_VERBS: Final = ("get", "list", "watch")
_DRAIN_ROLE: Final = "cardwise-drain"
# The roles for commands that change something. These roles include the rights to read.
_ROLES: Final = {"cordon": _DRAIN_ROLE, "uncordon": _DRAIN_ROLE, "drain": _DRAIN_ROLE, "defrag": "cardwise-defrag"}
_CLUSTER_WIDE_COMMANDS: Final = ("gangs", "simulate")  # commands that also read the pods of all namespaces
_ANONYMOUS_USER: Final = "system:anonymous"
_INVALID_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9.:@_-]+")  # characters that the name of a binding may not have


@dataclass(frozen=True, slots=True)
class _Denial:
    """A request that the API server denied. `namespace`: "" for the whole cluster."""

    user: str
    verb: str
    resource: str
    group: str
    namespace: str

    def __str__(self) -> str:
        scope = f"namespace {self.namespace}" if self.namespace else "the whole cluster"
        return f"the right to {self.verb} {self.resource} in {scope} is missing"

    def role_for(self, command: str) -> str:
        """The ClusterRole that grants this right, and the other rights that the command needs."""
        is_own_resource, is_write = self.group == names.GROUP, self.verb not in _READ_VERBS
        if command in _ROLES:
            return _DRAIN_ROLE if is_write and is_own_resource else _ROLES[command]
        if is_write:
            return _DRAIN_ROLE  # commands that only read need no such right
        if not self.namespace and (not is_own_resource or command in _CLUSTER_WIDE_COMMANDS):
            return "cardwise-inspect"
        return "cardwise-view" if is_own_resource else "view"

    def is_in_namespace(self, command: str) -> bool:
        """Whether a grant of this right in that namespace alone is enough."""
        return bool(self.namespace) and command not in _ROLES and self.verb in _READ_VERBS


def describe_missing_right(error: "errors.Forbidden") -> str:
    """Describe the missing right and the role that grants it, for a note beside a command's output."""
    denial = _parse_denial(error)
    if denial is None:
        return error.message
    if denial.user == _ANONYMOUS_USER:
        return _describe_anonymous()
    return f"{denial} (ClusterRole {denial.role_for('')}, docs/admin.md#looking)"


def describe_refusal(error: "errors.Forbidden", command: str = "") -> str:
    """Describe the missing right, and the command that an administrator runs to grant it.

    command: the command that ran; if a single role has all rights that the command needs, this role is proposed.
    """
    denial = _parse_denial(error)
    if denial is None:
        return error.message  # refused by a webhook, a policy or a quota: no role helps
    if denial.user == _ANONYMOUS_USER:
        return _describe_anonymous()
    role = denial.role_for(command)
    # The binding's name contains the user, since kubectl cannot create a second binding with the same name.
    name = _INVALID_IN_NAMES.sub("-", f"{role}-{denial.user}")
    binding = "clusterrolebinding {name:text}"
    if denial.is_in_namespace(command):
        binding = "rolebinding {name:text} -n {namespace}"
    bind = f"kubectl create {binding} --clusterrole={{role:text}} --user={{user:text}}"
    grant = shellcommand.command(bind, name=name, namespace=denial.namespace, role=role, user=denial.user)
    return f"{denial}; an administrator grants it with: {grant}"


def _describe_anonymous() -> str:
    """The remedy for the anonymous user.

    The remedy is never a role, since every client that can connect to the API server can be the anonymous user.
    """
    return (
        f"the API server sees you as {_ANONYMOUS_USER}, who may read nothing: your kubeconfig has no credentials; log "
        "in, or choose another with --context or --kubeconfig"
    )


def _parse_denial(error: "errors.Forbidden") -> _Denial | None:
    """Parse the denied request; None if the message does not name one."""
    match = _DENIAL_PATTERN.search(error.message)
    if match is None:
        return None
    return _Denial(match["user"], match["verb"], match["resource"], match["group"], match["namespace"] or "")

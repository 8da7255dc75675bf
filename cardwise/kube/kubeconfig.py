"""Reads the kubeconfigs that most people have: one file with certificates, a token or a password in it or beside it.

What starts programs or renews tokens (`exec`, `auth-provider`), several files at once, and what is no kubeconfig are
left to the official client, whose import costs more than all else of a command: `cardwise.kube.credentials`.
"""

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from cardwise.core.values.decoded import Json

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NEEDS_MORE: Final = ("exec", "auth-provider")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubeconfig:
    """One context of it. `ca` and `certificate` (with its key) are PEM; `token` is the header's value, or is read anew
    from `token_file`. "" is what the file does not say.
    """

    server: str
    namespace: str = ""
    verify: bool = True
    server_name: str = ""
    proxy: str = ""
    ca: bytes = b""
    certificate: tuple[bytes, bytes] | None = None
    token: str = ""
    token_file: Path | None = None


def read_kubeconfig(path: Path, context: str = "") -> Kubeconfig | None:
    """`context`: "" for the current one. None where it takes more than is done here. Raises OSError where a file that
    is named in it cannot be read.
    """
    try:
        config = yaml.load(path.read_bytes(), Loader=_LOADER)  # noqa: S506 - a safe one
    except (OSError, RecursionError, yaml.YAMLError):
        return None
    try:
        chosen = _find_named(config["contexts"], context or config["current-context"])["context"]
        cluster = _find_named(config["clusters"], chosen["cluster"])["cluster"]
        user = _find_named(config["users"], chosen["user"])["user"] if chosen.get("user") else {}
        if any(key in user for key in _NEEDS_MORE):
            return None
        certificate, key = (_read_content(user, name, path.parent) for name in ("client-certificate", "client-key"))
        return Kubeconfig(
            server=cluster["server"].rstrip("/"),
            namespace=chosen.get("namespace") or "",
            verify=not cluster.get("insecure-skip-tls-verify"),
            server_name=cluster.get("tls-server-name") or "",
            proxy=cluster.get("proxy-url") or "",
            ca=_read_content(cluster, "certificate-authority", path.parent),
            certificate=(certificate, key) if certificate else None,
            token=_authorization(user),
            token_file=path.parent / user["tokenFile"] if user.get("tokenFile") else None,
        )
    except (KeyError, TypeError, AttributeError, ValueError, StopIteration):
        return None


def _find_named(some: Any, name: str) -> Json:
    entry: Json = next(candidate for candidate in some if candidate["name"] == name)
    return entry


def _read_content(of: Json, key: str, folder: Path) -> bytes:
    """What `KEY-data` has, or else the file that `KEY` names, which may be relative to the kubeconfig."""
    data, file = of.get(f"{key}-data"), of.get(key)
    if data:
        return base64.b64decode(data)
    return (folder / file).read_bytes() if file else b""


def _authorization(user: Json) -> str:
    if user.get("token"):
        return f"Bearer {user['token']}"
    if user.get("username") and user.get("password") and not user.get("tokenFile"):
        credentials = f"{user['username']}:{user['password']}"
        return f"Basic {base64.b64encode(credentials.encode()).decode()}"
    return ""

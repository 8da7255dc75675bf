"""Reads common kubeconfigs: one file, with certificates, a token or a password in the file or in files next to it.

Kubeconfigs that run programs or renew tokens (`exec`, `auth-provider`), several files, and invalid files are read by
the official client instead (`cardwise.kube.credentials`). It is used only where needed, because its import takes longer
than the rest of a command.
"""

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from cardwise.core.values.decoded import Json

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_UNSUPPORTED_LOGIN_FIELDS: Final = ("exec", "auth-provider")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubeconfig:
    """One context of a kubeconfig. Fields that the file does not have are "".

    ca: PEM.
    certificate: the client certificate and its key, PEM.
    token: the value of the Authorization header.
    token_file: a file whose current content is the token.
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
    """Read one context of a kubeconfig; None if the kubeconfig has a setting that this module does not support. Raises
    OSError if a file that the kubeconfig names cannot be read.

    context: the name of the context; "" for the current context.
    """
    try:
        config = yaml.load(path.read_bytes(), Loader=_LOADER)  # noqa: S506 - a safe one
    except (OSError, RecursionError, yaml.YAMLError):
        return None
    try:
        chosen = _find_named(config["contexts"], context or config["current-context"])["context"]
        cluster = _find_named(config["clusters"], chosen["cluster"])["cluster"]
        user = _find_named(config["users"], chosen["user"])["user"] if chosen.get("user") else {}
        if any(key in user for key in _UNSUPPORTED_LOGIN_FIELDS):
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
            token=_authorization(user) or "",
            token_file=path.parent / user["tokenFile"] if user.get("tokenFile") else None,
        )
    except (KeyError, TypeError, AttributeError, ValueError, StopIteration):
        return None


def _find_named(entries: Any, name: str) -> Json:
    entry: Json = next(candidate for candidate in entries if candidate["name"] == name)
    return entry


def _read_content(section: Json, key: str, folder: Path) -> bytes:
    """The content of the field `KEY-data`, else of the file that the field `KEY` names, relative to the kubeconfig's
    folder.
    """
    data, file = section.get(f"{key}-data"), section.get(key)
    if data:
        return base64.b64decode(data)
    return (folder / file).read_bytes() if file else b""


def _authorization(user: Json) -> str | None:
    """The value of the Authorization header; None if the user has neither a token nor a password."""
    if user.get("token"):
        return f"Bearer {user['token']}"
    if user.get("username") and user.get("password") and not user.get("tokenFile"):
        credentials = f"{user['username']}:{user['password']}"
        return f"Basic {base64.b64encode(credentials.encode()).decode()}"
    return None

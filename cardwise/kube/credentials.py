"""Credentials: where the API server is, TLS, and the Authorization header, by kubeconfig or service account.

Of the official client only `kubernetes.config` is used, which knows kubeconfigs, exec plugins and token rotation.
"""

import os
import ssl
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from cardwise.kube import errors

Authorization = Callable[[], str | None]

DEFAULT_NAMESPACE = "default"

_SERVICE_ACCOUNT_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def load(kubeconfig: Path | None, context: str = "") -> tuple[Any, str]:
    """A `kubernetes.client.Configuration` and the namespace of who names none, as `KubeClient.load` says.

    Raises `errors.KubeConfigError`, which says what was tried.
    """
    # Importing the official client takes 0.3 s and 40 MB, which what never connects should not pay.
    from kubernetes import config  # noqa: PLC0415
    from kubernetes.client import Configuration  # noqa: PLC0415

    loaders: Any = config  # untyped
    configuration = Configuration()
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and _SERVICE_ACCOUNT_TOKEN.exists()
    try:
        if kubeconfig is None and not context and in_pod:
            where = "the pod's service account"
            loaders.load_incluster_config(client_configuration=configuration)
            namespace = _SERVICE_ACCOUNT_NAMESPACE.read_text() if _SERVICE_ACCOUNT_NAMESPACE.exists() else ""
        else:
            where = str(kubeconfig or os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config")
            contexts, active = loaders.list_kube_config_contexts(config_file=where)
            chosen = next((one for one in contexts if one["name"] == context), None) if context else active
            if chosen is None:
                known = ", ".join(str(one["name"]) for one in contexts)
                raise errors.KubeConfigError(f"there is no context {context!r} in {where}; those there are: {known}")
            loaders.load_kube_config(
                config_file=where,
                context=context or None,
                client_configuration=configuration,
                persist_config=False,
            )
            namespace = chosen["context"].get("namespace")
    except (loaders.ConfigException, OSError, TypeError, ValueError, AttributeError, yaml.YAMLError) as error:
        # The loader takes the file for one, so that what is none ends in words about Python's types.
        none = isinstance(error, TypeError | AttributeError | yaml.YAMLError)
        why = "it is no kubeconfig" if none else str(error)
        raise errors.KubeConfigError(
            f"no usable credentials in {where}: {why}; give --kubeconfig, or run in a pod with a service account"
        ) from error
    return configuration, namespace or DEFAULT_NAMESPACE


def proxy(configuration: Any) -> str | None:
    """The URL of the proxy to the API server, if there is one."""
    name = urlsplit(str(configuration.host)).hostname or ""
    found = configuration.proxy
    return None if not found or urllib.request.proxy_bypass(name) else str(found)


def authorization(configuration: Any) -> Authorization | None:
    """None when the client certificate is all: then no request ever asks."""

    def value() -> str | None:
        # Calls refresh_api_key_hook, which re-reads the pod's token file and re-runs exec plugins. Releases before
        # 36.0.1 knew only the second name, later ones file the token under the first.
        found = configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if not found and configuration.username:
            found = configuration.get_basic_auth_token()
        return str(found) if found else None

    if configuration.refresh_api_key_hook is None and value() is None:
        return None
    return value


def ssl_context(configuration: Any) -> ssl.SSLContext | None:
    """None for plain HTTP."""
    if not str(configuration.host).startswith("https"):
        return None
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Python 3.13 refuses CAs without key identifiers, which many clusters have and Go accepts.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context

"""Credentials for the API server from a kubeconfig or service account: address, TLS and the Authorization header.

Kubeconfigs that `kubeconfig` does not support (such as those with exec plugins) are read by `kubernetes.config` of the
official client. Service accounts are read here, because the official client decides by the wall clock when to read
their tokens again.
"""

import contextlib
import ipaddress
import os
import ssl
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from urllib3.exceptions import LocationParseError
from urllib3.util import parse_url

from cardwise.core.values import wording
from cardwise.kube import errors, kubeconfig
from cardwise.kube.kubeconfig import Kubeconfig

Authorization = Callable[[], str | None]

DEFAULT_NAMESPACE = "default"

# Why credentials cannot be sent. The text never contains the credentials.
INVALID_HEADER_PROBLEM = (
    "has a line break or another character that is not allowed in an HTTP header; write it as a single line"
)

_INVALID_KUBECONFIG_ERRORS = (TypeError, AttributeError, RecursionError, yaml.YAMLError)
_SERVICE_ACCOUNT_SOURCE = "the pod's service account"
_SERVER_FIELD = "clusters[].cluster.server"
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The connection settings of a `KubeClient`.

    authorization: returns the value of the Authorization header, or None; None if there is no such header.
    namespace: the namespace for callers that name none.
    """

    host: str
    ssl_context: ssl.SSLContext | None
    server_hostname: str | None
    authorization: Authorization | None
    proxy: str | None
    namespace: str


def load(file: Path | None, context: str = "") -> Credentials:
    """Load the credentials, from the sources that `KubeClient.load` lists. Raises `errors.KubeConfigError`."""
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and (_SERVICE_ACCOUNT / "token").exists()
    if file is None and not context and in_pod:
        return _from_service_account(_SERVICE_ACCOUNT)
    path = str(file or os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config")
    try:
        kubeconfig_read = kubeconfig.read_kubeconfig(Path(path).expanduser(), context)
        if kubeconfig_read is not None:
            return _from_kubeconfig(kubeconfig_read, path)
    except OSError as error:  # of TLS too
        raise _config_error(path, str(error)) from error
    return _load_by_library(path, context)


def _from_service_account(folder: Path) -> Credentials:
    """The credentials of the pod's service account. Raises `errors.KubeConfigError`."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "")
    if not host or not port:
        raise _config_error(_SERVICE_ACCOUNT_SOURCE, "KUBERNETES_SERVICE_HOST or KUBERNETES_SERVICE_PORT is empty")
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    namespace = folder / "namespace"
    try:
        ca = (folder / "ca.crt").read_bytes()
        if not ca.strip():
            raise _config_error(_SERVICE_ACCOUNT_SOURCE, f"{folder / 'ca.crt'} is empty")
        account = Kubeconfig(
            server=server,
            ca=ca,
            token_file=folder / "token",
            namespace=namespace.read_text().strip() if namespace.exists() else "",
        )
        return _from_kubeconfig(account, _SERVICE_ACCOUNT_SOURCE)
    except OSError as error:  # of TLS too
        raise _config_error(_SERVICE_ACCOUNT_SOURCE, str(error)) from error


def _from_kubeconfig(config: Kubeconfig, source: str) -> Credentials:
    """The credentials in a parsed kubeconfig. Raises OSError or KubeConfigError."""
    _check_url(config.server, _SERVER_FIELD, source)
    if not is_header_value(config.token):
        raise _config_error(source, f"users[].user.token {INVALID_HEADER_PROBLEM}")
    tls = None
    if config.server.startswith("https"):
        # The file may contain text between the certificates, and this text need not be ASCII.
        ca = config.ca.decode("ascii", "ignore") or None
        tls = _make_tls_context(ssl.create_default_context(cadata=ca), verify=config.verify)
        if config.certificate is not None:
            # Python reads client certificates only from files. These files are private and deleted at once.
            with tempfile.TemporaryDirectory() as folder:
                certificate, key = Path(folder) / "crt", Path(folder) / "key"
                certificate.write_bytes(config.certificate[0])
                key.write_bytes(config.certificate[1])
                tls.load_cert_chain(certificate, key)
    authorization: Authorization | None = None
    if config.token_file is not None:
        authorization = partial(_read_token, config.token_file)
    elif config.token:
        authorization = partial(str, config.token)
    return Credentials(
        host=config.server,
        ssl_context=tls,
        server_hostname=config.server_name or None,
        authorization=authorization,
        proxy=_find_proxy(config.server, config.proxy, source),
        namespace=config.namespace or DEFAULT_NAMESPACE,
    )


def _read_token(path: Path) -> str | None:
    """The header value with the token that is now in the file; None if the file cannot be read."""
    try:
        return f"Bearer {path.read_text(errors='replace').strip()}"
    except OSError:
        return None


def _load_by_library(source: str, context: str) -> Credentials:
    """The credentials of the kubeconfig `source`, by the official client. Raises `errors.KubeConfigError`."""
    # Imported here, because the import takes 0.3 s and 40 MB, and most commands do not need it.
    from kubernetes import config  # noqa: PLC0415
    from kubernetes.client import Configuration  # noqa: PLC0415

    loaders: Any = config  # untyped
    configuration = Configuration()
    configuration.proxy = None  # the library reads more environment variables than client-go does
    try:
        contexts, active = loaders.list_kube_config_contexts(config_file=source)
        chosen = (
            next((kube_context for kube_context in contexts if kube_context["name"] == context), None)
            if context
            else active
        )
        if chosen is None:
            context_names = ", ".join(str(kube_context["name"]) for kube_context in contexts)
            raise errors.KubeConfigError(f"{source} has no context {context!r}; its contexts: {context_names}")
        loaders.load_kube_config(
            config_file=source,
            context=context or None,
            client_configuration=configuration,
            persist_config=False,
        )
        namespace = chosen["context"].get("namespace")
    except (loaders.ConfigException, OSError, *_INVALID_KUBECONFIG_ERRORS, ValueError) as error:
        # For a file that is not a kubeconfig, the library's error is about Python types and would not help the user.
        is_invalid = isinstance(error, _INVALID_KUBECONFIG_ERRORS)
        reason = "not a kubeconfig" if is_invalid else str(error)
        raise _config_error(source, reason) from error
    _check_url(str(configuration.host), _SERVER_FIELD, source)
    return Credentials(
        host=str(configuration.host),
        ssl_context=_tls_context(configuration),
        server_hostname=configuration.tls_server_name,
        authorization=_authorization_of(configuration),
        proxy=_find_proxy(str(configuration.host), configuration.proxy, source),
        namespace=namespace or DEFAULT_NAMESPACE,
    )


def _config_error(source: str, reason: str) -> errors.KubeConfigError:
    return errors.KubeConfigError(
        f"no usable credentials in {source}: {wording.sanitize_message(reason)}; "
        "use --kubeconfig, or run in a pod with a service account"
    )


def _find_proxy(server: str, proxy_url: str | None, source: str) -> str | None:
    """The URL of the proxy to the API server; None for no proxy. Raises KubeConfigError.

    As in client-go, `proxy_url` of the kubeconfig takes precedence and ignores NO_PROXY. Else HTTPS_PROXY or HTTP_PROXY
    (by the scheme of `server`) is used, unless NO_PROXY matches the server. Go does not read ALL_PROXY.
    """
    if proxy_url:
        proxy = _add_scheme(str(proxy_url))
        _check_url(proxy, "clusters[].cluster.proxy-url", source)
        return proxy
    parts = urlsplit(server)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    variable, address = _environment_variable(f"{parts.scheme.upper()}_PROXY")
    if not address or _bypasses_proxy(host, port, _environment_variable("NO_PROXY")[1]):
        return None
    proxy = _add_scheme(address)
    if not _is_url(proxy):
        raise errors.KubeConfigError(
            f"{variable} is not the URL of an HTTP proxy such as http://10.0.0.1:3128; SOCKS is not supported. Correct "
            f"it, unset it, or add {host} to NO_PROXY"
        )
    return proxy


def _environment_variable(name: str) -> tuple[str, str | None]:
    """The name and value of an environment variable that may be in upper or lower case."""
    name = name if os.environ.get(name) else name.lower()
    return name, os.environ.get(name)


def _bypasses_proxy(host: str, port: int, no_proxy: str | None) -> bool:
    """Whether requests to this host bypass the proxy, by the rules of golang.org/x/net/http/httpproxy.

    no_proxy: a comma-separated list of IP addresses, CIDRs and domains. A domain includes its subdomains; `.domain`
        matches subdomains only; `*` matches all. An address or domain with a port matches only this port.
    """
    address = _parse_address(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    for entry in filter(None, (part.strip().lower() for part in (no_proxy or "").split(","))):
        if entry == "*":
            return True
        if address is not None and "/" in entry:
            with contextlib.suppress(ValueError):
                if address in ipaddress.ip_network(entry, strict=False):
                    return True
            continue
        name, _, entry_port = ("", "", "") if _parse_address(entry) else entry.rpartition(":")
        if not entry_port.isdigit():
            name = entry
        elif int(entry_port) != port:
            continue
        name = name.strip("[]")
        if address is not None:
            if _parse_address(name) == address:
                return True
        elif host == name or host.endswith("." + name.removeprefix("*").removeprefix(".")):
            return True
    return False


def _parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _add_scheme(proxy: str) -> str:
    return proxy if "://" in proxy else f"http://{proxy}"


def _check_url(url: str, field: str, source: str) -> None:
    """Check that the text is a URL. Raises KubeConfigError, without the text, which may contain a password."""
    if not _is_url(url):
        raise _config_error(source, f"{field} is not a URL such as https://10.0.0.1:6443")


def _is_url(text: str) -> bool:
    try:
        parts = parse_url(text)
    except LocationParseError:
        return False
    # HOST:PORT is enough, as for kubectl.
    return bool(parts.host) and parts.scheme in (None, "http", "https")


def is_header_value(text: str) -> bool:
    """Whether the text is allowed as the value of an HTTP header."""
    return text.isascii() and text.strip().isprintable()


def _authorization_of(configuration: Any) -> Authorization | None:
    """The source of the Authorization header; None if there is only a client certificate."""

    def read_header() -> str | None:
        # This calls refresh_api_key_hook, which runs exec plugins again. The official client has the token under the
        # name "authorization" before release 36.0.1, and under "BearerToken" since then.
        header = configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if not header and configuration.username:
            header = configuration.get_basic_auth_token()
        return str(header) if header else None

    if configuration.refresh_api_key_hook is None and read_header() is None:
        return None
    return read_header


def _tls_context(configuration: Any) -> ssl.SSLContext | None:
    """The TLS context; None for plain HTTP."""
    if not str(configuration.host).startswith("https"):
        return None
    context = _make_tls_context(
        ssl.create_default_context(cafile=configuration.ssl_ca_cert), verify=configuration.verify_ssl
    )
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context


class _SharedContext(ssl.SSLContext):
    """The TLS context of a client whose threads connect concurrently.

    urllib3 sets the ALPN protocols for each connection. This frees memory that the handshake of another thread may be
    copying, so that the API server rejects the handshake, or worse (https://github.com/python/cpython/issues/141012).
    So `_make_tls_context` sets the protocols once, and later settings are ignored.
    """

    def set_alpn_protocols(self, alpn_protocols: Iterable[str]) -> None:
        """Do nothing, because `_make_tls_context` has set the protocols."""


def _make_tls_context(context: ssl.SSLContext, *, verify: bool) -> ssl.SSLContext:
    context.set_alpn_protocols(["http/1.1"])
    context.__class__ = _SharedContext  # keeps the settings of `ssl.create_default_context`; a new object would not
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # By default Python 3.13 refuses CAs without key identifiers. Many clusters have such CAs, and Go accepts them.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context

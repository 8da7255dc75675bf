"""URL paths of the objects that Cardwise reads and writes, and the selectors of lists.

A path has exactly the given segments: each segment is quoted, and text that is not a valid path segment raises
`errors.InvalidName`. So a name can neither add a segment, a query or a fragment, nor turn the path of an object into
the path of a list. Values in selectors are checked in the same way.

Without a name, a function returns the path of a list. If the namespace is also missing, this is the list of all
namespaces.
"""

from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

from cardwise.core.api import names
from cardwise.core.values import objectnames
from cardwise.core.values.wording import quote_text
from cardwise.kube.errors import InvalidName

_CORE: Final = "/api/v1"
_ADMISSION: Final = "/apis/admissionregistration.k8s.io/v1"
_CARDWISE: Final = f"/apis/{names.API_VERSION}"


def namespaces(name: str | None = None) -> str:
    return _cluster(_CORE, "namespaces", name)


def pods(namespace: str = "", name: str | None = None, *sub: str) -> str:
    """The path of all pods, the pods of a namespace, one pod, or a pod's subresource `sub` such as "eviction"."""
    return namespaced(_CORE, "pods", namespace, name, *sub)


def nodes(name: str | None = None, *sub: str) -> str:
    return _cluster(_CORE, "nodes", name, *sub)


def secrets(namespace: str = "", name: str | None = None) -> str:
    return namespaced(_CORE, "secrets", namespace, name)


def configmaps(namespace: str = "", name: str | None = None) -> str:
    return namespaced(_CORE, "configmaps", namespace, name)


def events(namespace: str = "", name: str | None = None) -> str:
    return namespaced(_CORE, "events", namespace, name)


def selfsubjectreviews() -> str:
    return "/apis/authentication.k8s.io/v1/selfsubjectreviews"


def extendedresources(name: str | None = None, *sub: str) -> str:
    return _cluster(_CARDWISE, "extendedresources", name, *sub)


def resourceclasses(name: str | None = None, *sub: str) -> str:
    return _cluster(_CARDWISE, "resourceclasses", name, *sub)


def gpuquotas(namespace: str = "", name: str | None = None, *sub: str) -> str:
    return namespaced(_CARDWISE, "gpuquotas", namespace, name, *sub)


def podgroups(namespace: str = "", name: str | None = None, *sub: str) -> str:
    return namespaced(_CARDWISE, "podgroups", namespace, name, *sub)


def resourceclaims(namespace: str = "", name: str | None = None, *sub: str) -> str:
    return namespaced("/apis/resource.k8s.io/v1", "resourceclaims", namespace, name, *sub)


def poddisruptionbudgets(namespace: str = "", name: str | None = None) -> str:
    return namespaced("/apis/policy/v1", "poddisruptionbudgets", namespace, name)


def jobs(namespace: str = "", name: str | None = None) -> str:
    return namespaced("/apis/batch/v1", "jobs", namespace, name)


def leases(namespace: str = "", name: str | None = None) -> str:
    return namespaced("/apis/coordination.k8s.io/v1", "leases", namespace, name)


def mutatingwebhookconfigurations(name: str | None = None) -> str:
    return _cluster(_ADMISSION, "mutatingwebhookconfigurations", name)


def validatingwebhookconfigurations(name: str | None = None) -> str:
    return _cluster(_ADMISSION, "validatingwebhookconfigurations", name)


def validatingadmissionpolicies(name: str | None = None) -> str:
    return _cluster(_ADMISSION, "validatingadmissionpolicies", name)


def validatingadmissionpolicybindings(name: str | None = None) -> str:
    return _cluster(_ADMISSION, "validatingadmissionpolicybindings", name)


def namespaced(base: str, resource: str, namespace: str = "", name: str | None = None, *sub: str) -> str:
    """The path of objects of a namespaced kind.

    base: "/api/v1" or "/apis/<group>/<version>".
    resource: the plural of the kind, in lower case.
    """
    if namespace:
        return _cluster(f"{base}/namespaces/{_segment(namespace)}", resource, name, *sub)
    if name is not None:
        raise InvalidName(f"{resource} are namespaced: give the namespace of {quote_text(name)}")
    return _cluster(base, resource, None, *sub)


def label_query(key: str, text: str) -> dict[str, str]:
    """The query for the objects of a list whose label `key` has this value."""
    return {"labelSelector": f"{key}={_label_value(key, text)}"}


def label_in_query(key: str, texts: Iterable[str]) -> dict[str, str]:
    """The query for the objects of a list whose label `key` has one of these values."""
    return {"labelSelector": f"{key} in ({','.join(_label_value(key, text) for text in texts)})"}


def field_query(field: str, text: str) -> dict[str, str]:
    """The query that selects the objects of a list that have this value in a field, such as spec.nodeName."""
    escaped = _unicode(text).replace("\\", "\\\\").replace(",", "\\,").replace("=", "\\=")
    return {"fieldSelector": f"{field}={escaped}"}


def _label_value(key: str, text: str) -> str:
    if not objectnames.is_label_value(text):
        raise InvalidName(f"no object has the label {key}={quote_text(text)}: it is not a valid label value")
    return text


def _cluster(base: str, resource: str, name: str | None, *sub: str) -> str:
    if name is None:
        if sub:
            raise InvalidName(f"{'/'.join(sub)} is a subresource: give the name of one of the {resource}")
        return f"{base}/{resource}"
    return "/".join((base, resource, *map(_segment, (name, *sub))))


def _segment(text: str) -> str:
    """Quote the text as one segment of a path. Raises InvalidName."""
    problem = objectnames.path_segment_problem(text)
    if problem:
        raise InvalidName(f"{quote_text(text)} is not a valid name of a Kubernetes object: it {problem}")
    return quote(_unicode(text), safe="")


def _unicode(text: str) -> str:
    """The text, if a URL can have it. Raises InvalidName for half of a surrogate pair, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidName(f"{quote_text(text)} is not a valid text: {error.reason}") from error
    return text

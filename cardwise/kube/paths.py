"""URL paths of the objects that Cardwise reads and writes.

A typo in a path is made once and found once. Names come from the API server or are validated there; they are DNS names,
so nothing needs escaping.
"""

from cardwise.core.api import names

_CORE = "/api/v1"
_ADMISSION = "/apis/admissionregistration.k8s.io/v1"
_CARDWISE = f"/apis/{names.API_VERSION}"


def _join(base: str, *parts: str) -> str:
    return "/".join((base, *(part for part in parts if part)))


def namespaces(name: str = "") -> str:
    return _join(f"{_CORE}/namespaces", name)


def pods(namespace: str = "", name: str = "", sub: str = "") -> str:
    """All pods, those of a namespace, one pod, or its subresource ("binding", "status", "eviction", ...)."""
    return namespaced(_CORE, "pods", namespace, name, sub)


def nodes(name: str = "", sub: str = "") -> str:
    return _join(f"{_CORE}/nodes", name, sub)


def secrets(namespace: str = "", name: str = "") -> str:
    return namespaced(_CORE, "secrets", namespace, name)


def configmaps(namespace: str = "", name: str = "") -> str:
    return namespaced(_CORE, "configmaps", namespace, name)


def events(namespace: str = "", name: str = "") -> str:
    return namespaced(_CORE, "events", namespace, name)


def selfsubjectreviews() -> str:
    return "/apis/authentication.k8s.io/v1/selfsubjectreviews"


def extendedresources(name: str = "", sub: str = "") -> str:
    return _join(f"{_CARDWISE}/extendedresources", name, sub)


def resourceclasses(name: str = "", sub: str = "") -> str:
    return _join(f"{_CARDWISE}/resourceclasses", name, sub)


def gpuquotas(namespace: str = "", name: str = "", sub: str = "") -> str:
    return namespaced(_CARDWISE, "gpuquotas", namespace, name, sub)


def podgroups(namespace: str = "", name: str = "", sub: str = "") -> str:
    return namespaced(_CARDWISE, "podgroups", namespace, name, sub)


def poddisruptionbudgets(namespace: str = "", name: str = "") -> str:
    return namespaced("/apis/policy/v1", "poddisruptionbudgets", namespace, name)


def jobs(namespace: str = "", name: str = "") -> str:
    return namespaced("/apis/batch/v1", "jobs", namespace, name)


def leases(namespace: str = "", name: str = "") -> str:
    return namespaced("/apis/coordination.k8s.io/v1", "leases", namespace, name)


def mutatingwebhookconfigurations(name: str = "") -> str:
    return _join(f"{_ADMISSION}/mutatingwebhookconfigurations", name)


def validatingwebhookconfigurations(name: str = "") -> str:
    return _join(f"{_ADMISSION}/validatingwebhookconfigurations", name)


def namespaced(base: str, resource: str, namespace: str = "", name: str = "", sub: str = "") -> str:
    """For any namespaced kind: `base` is "/api/v1" or "/apis/<group>/<version>", `resource` the plural."""
    if namespace:
        return _join(base, "namespaces", namespace, resource, name, sub)
    if name:
        raise ValueError(f"{resource} are namespaced: give the namespace of {name!r}")
    return _join(base, resource)

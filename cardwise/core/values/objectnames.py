"""The API server's rules for names of Kubernetes objects (k8s.io/apimachinery, `validation.go`).

These rules check each name from outside the process before its use. Lengths are in characters.
"""

import re
from typing import Final

MAX_LABEL_LENGTH: Final = 63
MAX_SUBDOMAIN_LENGTH: Final = 253

_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_KIND: Final = re.compile(r"[A-Za-z]([-A-Za-z0-9]*[A-Za-z0-9])?")
_LABEL_VALUE: Final = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_DOTS: Final = (".", "..")
_SEPARATORS: Final = ("/", "%")


def is_label(text: str) -> bool:
    """Whether the text is a DNS label, such as the name of a namespace or a gang (RFC 1123)."""
    return len(text) <= MAX_LABEL_LENGTH and _LABEL.fullmatch(text) is not None


def is_subdomain(text: str) -> bool:
    """Whether the text is a DNS subdomain, such as the name of a pod or a node (RFC 1123)."""
    return len(text) <= MAX_SUBDOMAIN_LENGTH and _SUBDOMAIN.fullmatch(text) is not None


def is_kind(text: str) -> bool:
    """Whether the text can be the kind of an object, such as Deployment: a CRD's kind is a DNS label in lower case."""
    return len(text) <= MAX_LABEL_LENGTH and _KIND.fullmatch(text) is not None


def is_name_prefix(text: str) -> bool:
    """Whether the text is valid as `generateName` of an object whose name is a DNS subdomain: it may end with `-`."""
    return is_subdomain(f"{text[:-1]}a" if text.endswith("-") else text)


def is_label_value(text: str) -> bool:
    """Whether a label may have this value."""
    return len(text) <= MAX_LABEL_LENGTH and _LABEL_VALUE.fullmatch(text) is not None


def is_label_key(text: str) -> bool:
    """Whether a label may have this key: a name of at most 63 characters, after a DNS subdomain and `/` if the key has
    a prefix.
    """
    prefix, separator, name = text.rpartition("/")
    return bool(name) and is_label_value(name) and (is_subdomain(prefix) if separator else True)


def path_segment_problem(text: str) -> str | None:
    """Why the text cannot be a segment of a URL path, and so cannot be the name of an object; None if it can. These are
    the rules of the API server's `IsValidPathSegmentName`, and in addition the text must not be empty.
    """
    if not text:
        return "is empty"
    if text in _DOTS:
        return f"is {text!r}"
    forbidden = next((separator for separator in _SEPARATORS if separator in text), None)
    return f"contains {forbidden!r}" if forbidden is not None else None

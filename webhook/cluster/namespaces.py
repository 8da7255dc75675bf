"""The defaults that a namespace sets for its pods, in annotations. They apply if it has the label
`cardwise.dev/defaults: enabled`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cardwise.core.api import names
from cardwise.core.values.decoded import Json, annotations_of, labels_of

ENABLED = "enabled"
DISABLED = "disabled"
# Maximum number of characters of a default. The longest valid one, the key of a label in `policy`, has about 330.
MAX_DEFAULT_LENGTH = 512
# The annotations of a namespace, in the order of the fields of `Defaults`.
DEFAULTS_ANNOTATIONS = (
    names.DEFAULT_GPU_MEM, names.POLICY, names.ISOLATION, names.FRAMEWORKS, names.SM_PERCENT, names.SHARE_WITH,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Defaults:
    """A namespace's defaults: the texts of its annotations; "" if there is no annotation."""

    gpu_mem: str = ""
    policy: str = ""
    isolation: str = ""
    frameworks: str = ""
    sm_percent: str = ""
    share_with: str = ""


def defaults_of(namespace: Json) -> Defaults | None:
    """The defaults of a namespace; None if the namespace has not opted in."""
    if labels_of(namespace).get(names.DEFAULTS_LABEL) != ENABLED:
        return None
    return read_defaults(annotations_of(namespace))


def read_defaults(annotations: Mapping[str, str]) -> Defaults:
    """The defaults in the annotations of a namespace that has opted in.

    A text that is too long to be valid is cut to one character more than `MAX_DEFAULT_LENGTH`. The webhook keeps the
    defaults of all namespaces, and an annotation may have 256 KiB.
    """
    return Defaults(*(str(annotations.get(key, ""))[: MAX_DEFAULT_LENGTH + 1] for key in DEFAULTS_ANNOTATIONS))

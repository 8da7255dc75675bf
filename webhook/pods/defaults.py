"""Defaults of a namespace for its pods: a share of a card, a placement policy, an MPS mode, the frameworks' hook.

The default share is for pods without a GPU request, the other defaults are for pods with a share. Defaults apply only
in namespaces with the label `cardwise.dev/defaults: enabled`, and are annotations of the namespace. They are read when
a pod is created, so the author of the pod gets the error about a bad value, with the name of the namespace.
"""

from cardwise.core.api import names, policies
from cardwise.core.values import quantity
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.core.values.invalid import InvalidRequest
from webhook.cluster.namespaces import DISABLED, Defaults
from webhook.pods import frameworks, mpsmode


def check(defaults: Defaults, namespace: str) -> None:
    """Check the values. Raises InvalidRequest with the namespace's annotation as the field."""
    field = f"namespace {namespace}: metadata.annotations"
    if defaults.gpu_mem:
        try:
            quantity.memory(defaults.gpu_mem)
        except quantity.InvalidQuantity as error:
            raise InvalidRequest(f"{field}[{names.DEFAULT_GPU_MEM}]", error.problem, error.remedy) from error
    if defaults.policy:
        policies.find_policy(defaults.policy, f"{field}[{names.POLICY}]")
    if defaults.mps:
        mpsmode.check(defaults.mps, f"{field}[{names.MPS}]")
    if defaults.min_mps:
        mpsmode.check(defaults.min_mps, f"{field}[{names.MIN_MPS}]")
    if defaults.frameworks:
        frameworks.check(defaults.frameworks, f"{field}[{names.FRAMEWORKS}]")
    if defaults.sm_percent:
        mpsmode.check_percent(defaults.sm_percent, f"{field}[{names.SM_PERCENT}]")


def takes_defaults(pod: Json) -> bool:
    """Whether the pod takes defaults: it has not opted out, the scheduler places it (the pod of `kubectl debug node/…`
    names its node), and no container requests devices of NVIDIA's plugin.
    """
    annotations = annotations_of(pod)
    if annotations.get(names.DEFAULTS_OPT_OUT) == DISABLED:
        return False
    spec = pod.get("spec") or {}
    if spec.get("nodeName"):
        return False
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    limits = ((container.get("resources") or {}).get("limits") or {} for container in containers)
    return not any(name.startswith("nvidia.com/") for amounts in limits for name in amounts)


def apply_defaults(pod: Json, defaults: Defaults) -> Json:
    """The pod with the default share in its first container."""
    spec = pod.get("spec") or {}
    containers = spec.get("containers") or []
    if not defaults.gpu_mem or not containers or not takes_defaults(pod):
        return pod
    first, *others = containers
    resources = dict(first.get("resources") or {})
    resources["limits"] = {**(resources.get("limits") or {}), names.GPU_MEM: defaults.gpu_mem.strip()}
    return pod | {"spec": spec | {"containers": [first | {"resources": resources}, *others]}}

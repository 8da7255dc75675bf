"""Defaults of a namespace for its pods: a share of a card, a placement policy, isolation, the frameworks' hook.

The default share is for pods without a GPU request, the other defaults are for pods with a share. Defaults apply only
in namespaces with the label `cardwise.dev/defaults: enabled`, and are annotations of the namespace. They are read when
a pod is created. So the author of the pod gets the error about a bad value; it names the namespace.
"""

from dataclasses import astuple

from cardwise.core.api import isolation as tiers
from cardwise.core.api import names, policies, sharing
from cardwise.core.values import quantity
from cardwise.core.values.invalid import InvalidRequest
from webhook.cluster.namespaces import DEFAULTS_ANNOTATIONS, DISABLED, MAX_DEFAULT_LENGTH, Defaults
from webhook.pods import amounts, frameworks, isolation
from webhook.pods.context import Context
from webhook.pods.pod import PodUnderReview


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Take the namespace's defaults, and its share if the pod requests nothing. Raises InvalidRequest."""
    if context.defaults is None or not takes_defaults(pod):
        return
    check_defaults(context.defaults, context.namespace)
    pod.defaults = context.defaults
    if context.gives_default_share and context.defaults.gpu_mem and pod.gang is None and pod.read_request() is None:
        _add_share(pod, context.defaults.gpu_mem)
        amounts.add_units(pod, context)
        pod.forget_request()


def check_defaults(defaults: Defaults, namespace: str) -> None:
    """Check the values. Raises InvalidRequest with the namespace's annotation as the field."""
    field = f"namespace {namespace}: metadata.annotations"
    for key, text in zip(DEFAULTS_ANNOTATIONS, astuple(defaults), strict=True):
        if len(text) > MAX_DEFAULT_LENGTH:
            raise InvalidRequest(
                f"{field}[{key}]", "the text is too long", f"write at most {MAX_DEFAULT_LENGTH} characters"
            )
    if defaults.gpu_mem:
        try:
            quantity.parse_mib(defaults.gpu_mem)
        except quantity.InvalidQuantity as error:
            raise InvalidRequest(f"{field}[{names.DEFAULT_GPU_MEM}]", error.problem, error.remedy) from error
    if defaults.policy:
        policies.find_policy(defaults.policy, f"{field}[{names.POLICY}]")
    if defaults.isolation:
        tiers.parse_isolation(defaults.isolation, f"{field}[{names.ISOLATION}]")
    if defaults.frameworks:
        frameworks.normalize_frameworks(defaults.frameworks, f"{field}[{names.FRAMEWORKS}]")
    if defaults.sm_percent:
        isolation.parse_sm_percent(defaults.sm_percent, f"{field}[{names.SM_PERCENT}]")
    if defaults.share_with:
        sharing.check_share_with(defaults.share_with, f"{field}[{names.SHARE_WITH}]")


def takes_defaults(pod: PodUnderReview) -> bool:
    """Whether the pod takes defaults. It does not in three cases: it has opted out, it names its node itself (as the
    pod of `kubectl debug node/…`), or a container requests devices of NVIDIA's plugin.
    """
    if pod.annotations.get(names.DEFAULTS_OPT_OUT) == DISABLED or pod.spec.get("nodeName"):
        return False
    limits = ((container.spec.get("resources") or {}).get("limits") or {} for container in pod.containers)
    return not any(name.startswith("nvidia.com/") for amounts in limits for name in amounts)


def _add_share(pod: PodUnderReview, gpu_mem: str) -> None:
    """Request the share in the first container."""
    for i, container in enumerate(pod.containers):
        if container.key == "0":
            resources = dict(container.spec.get("resources") or {})
            resources["limits"] = {**(resources.get("limits") or {}), names.GPU_MEM: gpu_mem.strip()}
            pod.put_resources(i, resources)

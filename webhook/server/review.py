"""The codec of AdmissionReview v1: bytes to a `Review`, a `Decision` to bytes.

Later code may rely on types and names. This module raises `InvalidReview` if the bytes are not an AdmissionReview, if a
field has a wrong type, or if a name is impossible. Only the API server should call the webhook, but every client that
reaches the port can do so.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from cardwise.core.values import objectnames, wording
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.wording import quote_text
from cardwise.kube import wire
from cardwise.kube.wire import prepare_types
from webhook.server import sizes
from webhook.templates import templates

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"
CREATE, UPDATE = "CREATE", "UPDATE"

# The API server refuses longer quantities itself; Python refuses to turn very long ones into integers.
_Amount = Annotated[str, Meta(max_length=64)] | Annotated[int, Meta(ge=-(2**62), le=2**62)]
_Amounts = dict[str, _Amount] | None

# The API server forwards at most 4 KiB of warnings, and truncates each to 256 characters if they are longer in total.
_MAX_WARNINGS = 16


class InvalidReview(ValueError):
    """A request body that is not a valid AdmissionReview; the text is the reason."""


class UndecodableReview(InvalidReview):
    """A review whose object cannot be decoded. `uid`: the UID of the review, with which the response has the reason."""

    def __init__(self, uid: str, problem: str) -> None:
        super().__init__(problem)
        self.uid = uid


# A word that the API server writes, such as a resource.
_Word = Annotated[str, Meta(max_length=objectnames.MAX_SUBDOMAIN_LENGTH)]


class _Resource(Struct):
    resource: _Word
    group: str = ""


class _UserInfo(Struct):
    username: str = ""


class _Request(Struct, rename="camel"):
    uid: Annotated[str, Meta(min_length=1, max_length=256)]
    resource: _Resource
    operation: _Word = ""
    sub_resource: _Word = ""
    namespace: str = ""
    name: str = ""
    user_info: _UserInfo = msgspec.field(default_factory=_UserInfo)
    object: msgspec.Raw = msgspec.Raw(b"null")
    old_object: msgspec.Raw = msgspec.Raw(b"null")


class _Envelope(Struct, rename="camel"):
    api_version: str
    kind: str
    request: _Request


class _Owner(Struct):
    controller: bool | None = None


class _Fields(Struct, rename="camel"):
    operation: str = ""
    fields_v1: Json | None = None


class _ObjectMeta(Struct, rename="camel"):
    name: str | None = None
    generate_name: str | None = None
    namespace: str | None = None
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    finalizers: list[str] | None = None
    owner_references: list[_Owner] | None = None
    managed_fields: list[_Fields] | None = None


class _Resources(Struct):
    limits: _Amounts = None
    requests: _Amounts = None


class _FieldRef(Struct, rename="camel"):
    field_path: str = ""


class _Source(Struct, rename="camel"):
    field_ref: _FieldRef | None = None


class _EnvVar(Struct, rename="camel"):
    name: str
    value: str | None = None
    value_from: _Source | None = None


class _Port(Struct, rename="camel"):
    container_port: int | None = None


class _Mount(Struct, rename="camel"):
    name: str = ""
    mount_path: str = ""


class _Volume(Struct, rename="camel"):
    name: str = ""
    empty_dir: Json | None = None


class _SecurityContext(Struct, rename="camel"):
    run_as_user: int | None = None


class _Container(Struct, rename="camel"):
    name: str = ""
    command: list[str] | None = None
    ports: list[_Port] | None = None
    volume_mounts: list[_Mount] | None = None
    resources: _Resources | None = None
    env: list[_EnvVar] | None = None
    env_from: list[Json] | None = None
    restart_policy: str | None = None
    security_context: _SecurityContext | None = None


class _Gate(Struct):
    name: str = ""


class _SchedulingGroup(Struct, rename="camel"):
    pod_group_name: str | None = None


class _Toleration(Struct):
    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None


class _NodeSelectorRequirement(Struct):
    key: str
    operator: str
    values: list[str] | None = None


class _NodeSelectorTerm(Struct, rename="camel"):
    match_expressions: list[_NodeSelectorRequirement] | None = None
    match_fields: list[_NodeSelectorRequirement] | None = None


class _NodeSelector(Struct, rename="camel"):
    node_selector_terms: list[_NodeSelectorTerm] | None = None


class _PreferredTerm(Struct):
    preference: _NodeSelectorTerm | None = None


class _NodeAffinity(Struct):
    required: _NodeSelector | None = msgspec.field(name="requiredDuringSchedulingIgnoredDuringExecution", default=None)
    preferred: list[_PreferredTerm] | None = msgspec.field(
        name="preferredDuringSchedulingIgnoredDuringExecution", default=None
    )


class _Affinity(Struct, rename="camel"):
    node_affinity: _NodeAffinity | None = None


class _PodSpec(Struct, rename="camel"):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    volumes: list[_Volume] | None = None
    resources: _Resources | None = None
    host_network: bool | None = None
    node_name: str | None = None
    node_selector: dict[str, str] | None = None
    affinity: _Affinity | None = None
    runtime_class_name: str | None = None
    scheduler_name: str | None = None
    scheduling_gates: list[_Gate] | None = None
    scheduling_group: _SchedulingGroup | None = None
    tolerations: list[_Toleration] | None = None
    security_context: _SecurityContext | None = None


class _Pod(Struct):
    metadata: _ObjectMeta | None = None
    spec: _PodSpec | None = None


class _WorkloadSpec(Struct, rename="camel"):
    template: _Pod | None = None
    replicas: int | None = None
    parallelism: int | None = None
    completions: int | None = None
    pod_management_policy: str | None = None


class _Workload(Struct):
    metadata: _ObjectMeta | None = None
    spec: _WorkloadSpec | None = None


class _JobTemplate(Struct):
    spec: _WorkloadSpec | None = None


class _CronJobSpec(Struct, rename="camel"):
    job_template: _JobTemplate | None = None


class _CronJob(Struct):
    metadata: _ObjectMeta | None = None
    spec: _CronJobSpec | None = None


class _PodTemplate(Struct):
    """The API object PodTemplate, which is a template without a workload."""

    metadata: _ObjectMeta | None = None
    template: _Pod | None = None


class _QuotaSpec(Struct):
    hard: _Amounts = None


class _ResourceQuota(Struct):
    metadata: _ObjectMeta | None = None
    spec: _QuotaSpec | None = None


class _LimitRangeItem(Struct, rename="camel"):
    max: _Amounts = None
    min: _Amounts = None
    default: _Amounts = None
    default_request: _Amounts = None


class _LimitRangeSpec(Struct):
    limits: list[_LimitRangeItem] | None = None


class _LimitRange(Struct):
    metadata: _ObjectMeta | None = None
    spec: _LimitRangeSpec | None = None


class _CustomResource(Struct):
    """A ResourceClass or a GPUQuota. The API server has not checked its schema yet, so its fields may have any type."""

    metadata: _ObjectMeta | None = None
    spec: Json | None = None


class _AnyObject(Struct):
    metadata: _ObjectMeta | None = None
    spec: dict[str, msgspec.Raw] | None = None


_SHAPE_BY_RESOURCE: dict[str, type[Struct]] = {
    "pods": _Pod,
    **dict.fromkeys(templates.KINDS, _Workload),
    "cronjobs": _CronJob,
    "podtemplates": _PodTemplate,
    "resourcequotas": _ResourceQuota,
    "limitranges": _LimitRange,
    "resourceclasses": _CustomResource,
    "gpuquotas": _CustomResource,
}
_TOO_DEEP_TEXT = "is nested too deeply to be read; remove the deep parts, such as metadata.managedFields"
_OBJECT_KEY = b'"object"'  # the API server writes all other keys that are read before this key
# The reviewed kinds that are not namespaced.
_CLUSTER_SCOPED = frozenset({"namespaces", "resourceclasses"})
_NAMESPACED = frozenset({*_SHAPE_BY_RESOURCE, "bindings"}) - _CLUSTER_SCOPED
# Resources whose decision also needs the stored object and, except for pods, the managedFields of both objects.
_RESOURCES_WITH_OLD_OBJECT = templates.KINDS | {"pods", "resourcequotas", "limitranges", "resourceclasses"}
_decode_envelope = msgspec.json.Decoder(_Envelope).decode
# Floats are parsed by Python: msgspec takes fifteen times as long for some of them, and a review of 7 MB would block
# all threads for three seconds.
_decode_object = msgspec.json.Decoder(Json, float_hook=float).decode
_decode_shape = {resource: msgspec.json.Decoder(shape).decode for resource, shape in _SHAPE_BY_RESOURCE.items()}
_decode_any = msgspec.json.Decoder(_AnyObject).decode
prepare_types(_Pod)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """A decoded review.

    resource: the plural with its subresource, such as `pods/binding`.
    old: the stored object at an UPDATE of a kind that needs it; else None.
    caller: the network of the client (`client_network`).

    Both objects lack the fields that `wire.trim_object` removes.
    """

    uid: str
    resource: str
    operation: str
    namespace: str
    name: str
    username: str
    object: Json
    old: Json | None = None
    caller: str = ""

    @property
    def is_update(self) -> bool:
        """Whether the object exists already."""
        return self.operation == UPDATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The response: a refusal with `message` about the field `about`, or admission with a patch (RFC 6902) and
    warnings.
    """

    allowed: bool = True
    message: str = ""
    about: str = ""
    patch: list[Json] = field(default_factory=list)
    warnings: tuple[str, ...] = ()


def decode(body: bytes, accepts_resource: Callable[[str], bool] = lambda _: True) -> Review:
    """Decode a request body. Raises InvalidReview, and UndecodableReview.

    accepts_resource: returns whether reviews of a resource belong to the path. The objects of other resources are not
      decoded.
    """
    try:
        envelope = _decode_envelope(body)
    except RecursionError as error:
        raise _nesting_error(body) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidReview(f"the body is no {KIND}: {error}") from error
    if (envelope.api_version, envelope.kind) != (API_VERSION, KIND):
        raise InvalidReview(
            f"expected {API_VERSION} {KIND}, got {quote_text(envelope.api_version)} {quote_text(envelope.kind)}"
        )
    request = envelope.request
    resource = request.resource.resource
    subject = f"{resource}/{request.sub_resource}" if request.sub_resource else resource
    if not accepts_resource(subject):
        raise InvalidReview(
            f"the resource {quote_text(subject)} is not reviewed at this path; send it where the chart's webhook "
            "configurations do"
        )
    compared = (
        resource in _RESOURCES_WITH_OLD_OBJECT and request.operation == UPDATE and bytes(request.old_object) != b"null"
    )
    managed_fields = compared and resource != "pods"
    try:
        manifest = _decode_manifest(request, "object", request.object, managed_fields=managed_fields)
    except InvalidRequest as error:
        raise UndecodableReview(request.uid, str(error)) from error
    old = None
    if compared:
        # A user must be able to shrink an object that became too large while the webhook was down.
        with contextlib.suppress(InvalidRequest):
            old = _decode_manifest(request, "oldObject", request.old_object, managed_fields=managed_fields)
    _refuse_impossible_names(request, manifest)
    return Review(
        uid=request.uid,
        resource=subject,
        operation=request.operation,
        namespace=request.namespace,
        name=request.name,
        username=request.user_info.username,
        object=manifest,
        old=old,
    )


def _nesting_error(body: bytes) -> InvalidReview:
    """The error for a review with a part that is nested too deeply.

    The API server writes the uid before the objects, so the uid can be read for the response. The part is not named,
    because a search for it would take a second.
    """
    head = body.partition(_OBJECT_KEY)[0].rstrip().removesuffix(b",") + b"}}"
    try:
        return UndecodableReview(_decode_envelope(head).request.uid, f"object or oldObject {_TOO_DEEP_TEXT}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return InvalidReview(f"the body is no {KIND}: it {_TOO_DEEP_TEXT}")


def _decode_manifest(request: _Request, field: str, raw: msgspec.Raw, *, managed_fields: bool) -> Json:
    """Decode an object. Raises InvalidRequest if it is too large to be decoded, and UndecodableReview."""
    resource = request.resource.resource
    try:
        text = wire.trim_object(bytes(raw), managed_fields=managed_fields)
        sizes.check_text(text)
        _decode_shape.get(resource, _decode_any)(text)
        return _decode_object(text)
    except RecursionError as error:  # decoding it into Python objects may need more stack than skipping it
        raise UndecodableReview(request.uid, f"{field} {_TOO_DEEP_TEXT}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        kind = wording.sanitize_message(resource, 80)
        problem = f"{field} does not have the structure of {kind}: {error}; correct this field"
        raise UndecodableReview(request.uid, problem) from error


def _refuse_impossible_names(request: _Request, manifest: Json) -> None:
    """Check the names of a review. Raises UndecodableReview for a name that objects of the kind cannot have.

    "" is valid, because an object that is being created may have only a `generateName`. Kinds with other rules for
    names, such as roles, are not reviewed.
    """
    kind, metadata = request.resource.resource, manifest.get("metadata") or {}
    is_name = objectnames.is_label if kind == "namespaces" else objectnames.is_subdomain
    for path, text, is_valid in (
        ("request.namespace", request.namespace, objectnames.is_label),
        ("request.name", request.name, is_name),
        ("metadata.namespace", metadata.get("namespace"), objectnames.is_label),
        ("metadata.name", metadata.get("name"), is_name),
        ("metadata.generateName", metadata.get("generateName"), objectnames.is_name_prefix),
    ):
        if text and not is_valid(text):
            rule = "63 of a-z, 0-9 and '-'" if is_valid is objectnames.is_label else "253 of a-z, 0-9, '-' and '.'"
            raise UndecodableReview(
                request.uid, f"{path}: {quote_text(text)} is not a name in Kubernetes; write at most {rule}"
            )
    if kind in _NAMESPACED and not request.namespace:
        raise UndecodableReview(request.uid, "request.namespace: is empty; name the namespace of the object")


def is_pod_shaped(template: Json) -> bool:
    """Whether a template in an object of any kind has the fields of a pod with their types, as `decode` checks for
    pods.
    """
    try:
        msgspec.convert(template, _Pod)
    except msgspec.ValidationError:
        return False
    return True


def encode(uid: str, decision: Decision) -> bytes:
    """Encode the response. The texts of the response are limited in length, because they contain texts of users."""
    response: Json = {"uid": uid, "allowed": decision.allowed}
    if not decision.allowed:
        response["status"] = {"code": 422, "reason": "Invalid", "message": wording.sanitize_message(decision.message)}
    if decision.warnings:
        response["warnings"] = [wording.sanitize_message(warning) for warning in decision.warnings[:_MAX_WARNINGS]]
        if (omitted := len(decision.warnings) - _MAX_WARNINGS) > 0:
            response["warnings"][-1] = f"and {wording.pluralize(omitted + 1, 'more warning')}"
    if decision.allowed and decision.patch:
        # msgspec encodes bytes as base64, which this field needs.
        response |= {"patchType": "JSONPatch", "patch": _encode(decision.patch)}
    return _encode({"apiVersion": API_VERSION, "kind": KIND, "response": response})

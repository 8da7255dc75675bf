"""AdmissionReview v1, in and out: bytes to a `Review`, a `Decision` to bytes.

Apart because everything after it may rely on shapes: what is no AdmissionReview, or holds an object that is not shaped
like its kind, ends here as `BadReview`. Only the API server should call us, but anybody who reaches the port can.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"

Json = dict[str, Any]

# The API server refuses longer quantities itself; Python refuses to turn very long ones into integers.
_Amount = Annotated[str, Meta(max_length=64)] | Annotated[int, Meta(ge=-(2**62), le=2**62)]
_Amounts = dict[str, _Amount] | None


class BadReview(ValueError):
    """A request body that is no usable AdmissionReview; the text says what is wrong with it."""


class _Resource(Struct):
    resource: str
    group: str = ""


class _UserInfo(Struct):
    username: str = ""


class _Request(Struct, rename="camel"):
    uid: Annotated[str, Meta(min_length=1, max_length=256)]
    resource: _Resource
    operation: str = ""
    sub_resource: str = ""
    namespace: str = ""
    name: str = ""
    user_info: _UserInfo = msgspec.field(default_factory=_UserInfo)
    object: msgspec.Raw = msgspec.Raw(b"null")


class _Envelope(Struct, rename="camel"):
    api_version: str
    kind: str
    request: _Request


class _ObjectMeta(Struct):
    name: str | None = None
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None


class _Resources(Struct):
    limits: _Amounts = None
    requests: _Amounts = None


class _EnvVar(Struct, rename="camel"):
    name: str
    value: str | None = None
    value_from: Json | None = None


class _Container(Struct, rename="camel"):
    name: str = ""
    resources: _Resources | None = None
    env: list[_EnvVar] | None = None
    env_from: list[Json] | None = None
    restart_policy: str | None = None


class _PodSpec(Struct, rename="camel"):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    node_name: str | None = None
    runtime_class_name: str | None = None


class _Pod(Struct):
    metadata: _ObjectMeta | None = None
    spec: _PodSpec | None = None


class _QuotaSpec(Struct):
    hard: _Amounts = None


class _ResourceQuota(Struct):
    spec: _QuotaSpec | None = None


class _LimitRangeItem(Struct, rename="camel"):
    max: _Amounts = None
    min: _Amounts = None
    default: _Amounts = None
    default_request: _Amounts = None


class _LimitRangeSpec(Struct):
    limits: list[_LimitRangeItem] | None = None


class _LimitRange(Struct):
    spec: _LimitRangeSpec | None = None


class _AnyObject(Struct):
    metadata: _ObjectMeta | None = None


_SHAPES: dict[str, type[Struct]] = {"pods": _Pod, "resourcequotas": _ResourceQuota, "limitranges": _LimitRange}
_decode_envelope = msgspec.json.Decoder(_Envelope).decode
_decode_object = msgspec.json.Decoder(Json).decode
_decode_shape = {resource: msgspec.json.Decoder(shape).decode for resource, shape in _SHAPES.items()}
_decode_any = msgspec.json.Decoder(_AnyObject).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """What is asked. `resource` is the plural with its subresource, such as `pods/binding`."""

    uid: str
    resource: str
    operation: str
    namespace: str
    name: str
    username: str
    object: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The answer: a refusal with `message`, or leave with a patch (RFC 6902) and warnings for the user."""

    allowed: bool = True
    message: str = ""
    patch: list[Json] = field(default_factory=list)
    warnings: tuple[str, ...] = ()


def decode(body: bytes) -> Review:
    """Raises BadReview."""
    try:
        envelope = _decode_envelope(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadReview(f"the body is no {KIND}: {error}") from error
    if (envelope.api_version, envelope.kind) != (API_VERSION, KIND):
        raise BadReview(f"expected {API_VERSION} {KIND}, got {envelope.api_version[:80]} {envelope.kind[:80]}")
    request = envelope.request
    try:
        _decode_shape.get(request.resource.resource, _decode_any)(request.object)
        obj = _decode_object(request.object)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadReview(
            f"request.object is not shaped like one of {request.resource.resource[:80]}: {error}"
        ) from error
    sub = f"/{request.sub_resource}" if request.sub_resource else ""
    return Review(
        uid=request.uid,
        resource=request.resource.resource + sub,
        operation=request.operation,
        namespace=request.namespace,
        name=request.name,
        username=request.user_info.username,
        object=obj,
    )


def encode(review: Review, decision: Decision) -> bytes:
    response: Json = {"uid": review.uid, "allowed": decision.allowed}
    if not decision.allowed:
        response["status"] = {"code": 422, "reason": "Invalid", "message": decision.message}
    if decision.warnings:
        response["warnings"] = decision.warnings
    if decision.allowed and decision.patch:
        # Bytes become base64, which is what the field wants.
        response |= {"patchType": "JSONPatch", "patch": _encode(decision.patch)}
    return _encode({"apiVersion": API_VERSION, "kind": KIND, "response": response})

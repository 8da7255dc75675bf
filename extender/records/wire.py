"""kube-scheduler's calls and the responses, as in k8s.io/kube-scheduler `extender/v1/types.go`.

These Go types have no JSON tags, so the keys are the Go field names. Go reads keys in upper or lower case: gpushare's
old schedulers sent `pod`, `nodenames`. The usual spelling is decoded by a fast path; other spellings are decoded as Go
does. Responses use the Go names exactly.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import msgspec
from msgspec import Struct

from cardwise.core.values import objectnames
from cardwise.kube.wire import prepare_types
from extender.records.pod import Pod


class Malformed(ValueError):
    """The body is not a valid call of this verb. The text says why."""


class _PodArgs(Struct, rename="pascal", dict=True):
    """The arguments of a call about a pod to be placed. `dict=True` is needed for the cached `parsed_pod`."""

    pod: dict[str, Any] | None = None

    @cached_property
    def parsed_pod(self) -> Pod:
        """The pod of the call."""
        return Pod(self.pod or {})


class FilterArgs(_PodArgs):
    """The arguments of filter and prioritize.

    `nodes` is set if kube-scheduler's configuration has nodeCacheCapable: false, else `node_names`.
    """

    nodes: "NodeList | None" = None
    node_names: list[str] | None = None

    def candidate_names(self) -> list[str] | None:
        """The names of the candidate nodes, from either field."""
        if self.node_names is not None or self.nodes is None:
            return self.node_names
        return [node.metadata.name for node in self.nodes.node_heads()]


class _Resources(Struct):
    limits: dict[str, str | int] | None = None
    requests: dict[str, str | int] | None = None


class _Security(Struct, rename="camel"):
    run_as_user: int | None = None


class _FieldRef(Struct, rename="camel"):
    field_path: str = ""


class _Source(Struct, rename="camel"):
    field_ref: _FieldRef | None = None


class _EnvVar(Struct, rename="camel"):
    name: str = ""
    value: str | None = None
    value_from: _Source | None = None


class _Container(Struct, rename="camel"):
    name: str = ""
    env: list[_EnvVar] | None = None
    resources: _Resources | None = None
    security_context: _Security | None = None


class _Owner(Struct):
    uid: str | None = None
    controller: bool | None = None


class _PodMeta(Struct, rename="camel"):
    name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    owner_references: list[_Owner] | None = None


class _SchedulingGroup(Struct, rename="camel"):
    pod_group_name: str | None = None


class _Affinity(Struct, rename="camel"):
    node_affinity: dict[str, Any] | None = None
    pod_affinity: dict[str, Any] | None = None
    pod_anti_affinity: dict[str, Any] | None = None


class _PodSpec(Struct, rename="camel"):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    security_context: _Security | None = None
    host_users: bool | None = None
    priority: int | None = None
    scheduler_name: str | None = None
    affinity: _Affinity | None = None
    topology_spread_constraints: list[dict[str, Any]] | None = None
    scheduling_group: _SchedulingGroup | None = None


class _PodShape(Struct):
    """The fields whose types `core.api.request` and the verbs rely on."""

    metadata: _PodMeta | None = None
    spec: _PodSpec | None = None


prepare_types(_PodShape)


class NodeName(Struct):
    name: str = ""


class NodeHead(Struct):
    metadata: NodeName


class NodeList(Struct):
    """A v1 NodeList. Its items are not decoded, and are returned unchanged as bytes."""

    items: list[msgspec.Raw] | None = None

    def node_heads(self) -> list[NodeHead]:
        return [_decode_node(raw_node) for raw_node in self.items or ()]

    def select_nodes(self, names: set[str]) -> "NodeList":
        """The list with only the items of these nodes."""
        raw_nodes = self.items or []
        selected = [
            raw_node for raw_node, node in zip(raw_nodes, self.node_heads(), strict=True) if node.metadata.name in names
        ]
        return NodeList(items=selected)


class FilterResult(Struct, rename="pascal"):
    """The nodes that fit, and why the other nodes do not fit."""

    nodes: NodeList | None = None
    node_names: list[str] | None = None
    failed_nodes: dict[str, str] = {}
    failed_and_unresolvable_nodes: dict[str, str] = {}
    error: str = ""


class HostPriority(Struct, rename="pascal", gc=False):
    host: str
    score: int


class BindArgs(Struct, rename="pascal"):
    pod_name: str = ""
    pod_namespace: str = ""
    pod_uid: str = msgspec.field(default="", name="PodUID")
    node: str = ""


class BindResult(Struct, rename="pascal"):
    error: str = ""


class _Uid(Struct):
    uid: str = ""


class _Victim(Struct):
    metadata: _Uid


class Victims(Struct, rename="pascal"):
    """Whole pods, as a scheduler with nodeCacheCapable: false sends them."""

    pods: list[_Victim] | None = None
    num_pdb_violations: int = msgspec.field(default=0, name="NumPDBViolations")


class MetaPod(Struct, rename="upper"):
    """A victim by UID, as in kube-scheduler's MetaPod."""

    uid: str = ""


class MetaVictims(Struct, rename="pascal"):
    pods: list[MetaPod] | None = None
    num_pdb_violations: int = msgspec.field(default=0, name="NumPDBViolations")


class PreemptArgs(_PodArgs):
    """The arguments of preempt.

    `node_name_to_victims` is set if kube-scheduler's configuration has nodeCacheCapable: false, else
    `node_name_to_meta_victims`.
    """

    node_name_to_victims: dict[str, Victims | None] | None = None
    node_name_to_meta_victims: dict[str, MetaVictims | None] | None = None

    def victim_uids_by_node(self) -> dict[str, list[str]]:
        """The UIDs of kube-scheduler's victims by node, from either field."""
        victims_by_node = {
            node: [victim.metadata.uid for victim in (victims.pods if victims is not None else None) or ()]
            for node, victims in (self.node_name_to_victims or {}).items()
        }
        for node, meta in (self.node_name_to_meta_victims or {}).items():
            victims_by_node[node] = [victim.uid for victim in (meta.pods if meta is not None else None) or ()]
        return victims_by_node

    def as_meta_victims(self) -> dict[str, MetaVictims]:
        """kube-scheduler's own victims, in the form of a response."""
        proposed = {**(self.node_name_to_victims or {}), **(self.node_name_to_meta_victims or {})}
        return {
            node: MetaVictims(
                [MetaPod(uid) for uid in uids], victims.num_pdb_violations if (victims := proposed[node]) else 0
            )
            for node, uids in self.victim_uids_by_node().items()
        }


class PreemptResult(Struct, rename="pascal"):
    node_name_to_meta_victims: dict[str, MetaVictims] = {}


encode = msgspec.json.Encoder().encode
_decode_node = msgspec.json.Decoder(NodeHead).decode
_decode_filter = msgspec.json.Decoder(FilterArgs).decode
_decode_bind = msgspec.json.Decoder(BindArgs).decode
_decode_preempt = msgspec.json.Decoder(PreemptArgs).decode
_decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def decode_filter_args(body: bytes) -> FilterArgs:
    """Decode a call of filter or prioritize. Raises Malformed."""
    try:
        args = _decode_filter(body)
        if args.pod is None or args.candidate_names() is None:
            args = _decode_filter(_normalize_keys(body, FilterArgs))
        if args.pod is None:
            raise Malformed("arg or pod is nil")  # gpushare's text, as the text below
        if args.candidate_names() is None:
            raise Malformed("cannot get node names")
        _check_pod(args.pod)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(_describe_error(body, error)) from error
    return args


def decode_preempt_args(body: bytes) -> PreemptArgs:
    """Decode a call of preempt. Raises Malformed."""
    try:
        args = _decode_preempt(body)
        if args.pod is None:
            args = _decode_preempt(_normalize_keys(body, PreemptArgs))
        if args.pod is None:
            raise Malformed("arg or pod is nil")
        _check_pod(args.pod)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(_describe_error(body, error)) from error
    return args


def decode_bind_args(body: bytes) -> BindArgs:
    """Decode a call of bind. Raises Malformed."""
    try:
        args = _decode_bind(body)
        if not (args.pod_name and args.node):
            args = _decode_bind(_normalize_keys(body, BindArgs))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(_describe_error(body, error)) from error
    missing = [name for name in ("PodName", "PodNamespace", "PodUID", "Node") if not getattr(args, _FIELDS[name])]
    if missing:
        raise Malformed(f"{' and '.join(missing)} missing in the bind call")
    _check_names(
        ("PodName", args.pod_name, objectnames.is_subdomain),
        ("PodNamespace", args.pod_namespace, objectnames.is_label),
        ("Node", args.node, objectnames.is_subdomain),
    )
    return args


_FIELDS = {"PodName": "pod_name", "PodNamespace": "pod_namespace", "PodUID": "pod_uid", "Node": "node"}


def _check_pod(pod: dict[str, Any]) -> None:
    """Check the types of the pod's fields. Raises Malformed and msgspec.ValidationError."""
    metadata = msgspec.convert(pod, _PodShape).metadata or _PodMeta()
    _check_names(
        ("Pod.metadata.name", metadata.name, objectnames.is_subdomain),
        ("Pod.metadata.namespace", metadata.namespace, objectnames.is_label),
    )


def _check_names(*fields: tuple[str, str | None, Callable[[str], bool]]) -> None:
    """Check that these texts are valid names of their kind. Empty texts are not checked. Raises Malformed."""
    for name, text, is_valid in fields:
        if text and not is_valid(text):
            raise Malformed(f"{name} is not a valid Kubernetes name")


def _normalize_keys(body: bytes, kind: type[Struct]) -> bytes:
    """The body with its keys in the usual spelling. Recognizes keys in upper or lower case, as Go's encoding/json
    does.
    """
    names_by_lower = {field.encode_name.lower(): field.encode_name for field in msgspec.structs.fields(kind)}
    normalized: dict[str, msgspec.Raw] = {}
    for key, raw in _decode_raw(body).items():
        name = names_by_lower.get(key.lower())
        if name is not None and (key == name or name not in normalized):
            normalized[name] = raw
    return encode(normalized)


def _describe_error(body: bytes, error: Exception) -> str:
    return f"cannot read the call: {error}" if body.strip() else "EOF"  # gpushare's (Go's) answer to an empty body

"""Rewrites ResourceQuotas and LimitRanges in the same way as the pods that they count.

Amounts of gpu-mem become MiB: Kubernetes adds up plain numbers, so `64Gi` would mean 68,719,476,736 MiB, which no
cluster reaches. A new number without a unit has the unit of the namespace's pods. A stored number is in MiB. So an
update that leaves the number as it is also leaves the amount as it is. If numbers without a unit mean GiB, the webhook
also writes the amount in MiB to the annotation `cardwise.dev/gpu-mem-mib`. There the webhook recognizes the amount in a
second call (reinvocation), and in copies of the object.

Names of Cardwise's resources become the keys by which a ResourceQuota counts requests. For names with a domain,
Kubernetes counts only `requests.NAME`, and silently ignores other keys.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from cardwise.core.api import lookalikes, names
from cardwise.core.values import quantity
from cardwise.core.values.decoded import Json, annotations_of, with_annotations
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import InvalidQuantity, Unit
from webhook.pods.amounts import add_unit
from webhook.templates import records
from webhook.templates.spellings import NameTranslator, counted_resource, format_count, warn_unknown_classes

_QUOTA_KEYS = (names.GPU_MEM, f"requests.{names.GPU_MEM}", f"limits.{names.GPU_MEM}")
_MARKER_RESOURCES = (names.FILTER_CALL_RESOURCE, names.BIND_CALL_RESOURCE)
_HARD_FIELD = "spec.hard"
_MAX_COMPARED = 8  # maximum number of bare names that get a suggestion, since each is compared with all known names
_DEFAULT_FIELDS = ("default", "defaultRequest")
_RANGE_FIELDS = ("max", "min", *_DEFAULT_FIELDS)  # without maxLimitRequestRatio, which is not an amount


def rewrite_resource_quota(
    quota: Json, old: Json | None, translator: NameTranslator, *, update: bool, unit: Unit = Unit.MIB
) -> tuple[Json, list[str]]:
    """The rewritten quota, and warnings. Raises InvalidRequest, KubeError.

    old: the stored quota at an update.
    unit: the unit of gpu-mem numbers without a unit.
    """
    spec = quota.get("spec") or {}
    hard = spec.get("hard")
    if not hard:
        return quota, []
    _refuse_markers(hard)
    rewriting = _Rewriting.from_manifest(quota, _amounts_of_quota(old or {}), unit)
    record = records.read_record(quota).get("hard", frozenset())
    place = records.rewrite_place(
        {_HARD_FIELD: rewriting.rewrite_amounts(hard, _HARD_FIELD)},
        translator.translate_quota_name,
        place="hard",
        recorded=record,
        manifests=records.read_manifests(quota, old, _keys_of_manifest),
        update=update,
        many_classes=True,
    )
    rewritten_quota = rewriting.annotate(quota | {"spec": spec | {"hard": place.amounts[_HARD_FIELD]}})
    if place.changed:
        rewritten_quota = records.with_record(rewritten_quota, {"hard": place.own_keys})
    warnings = warn_unknown_classes(_HARD_FIELD, place.written_names, translator)
    further_warnings = [
        *_warn_bare_names(place.amounts[_HARD_FIELD]),
        *_warn_counts_less(place.written_names),
        *_warn_unchanged(quota, old, record),
    ]
    return rewritten_quota, [*rewriting.warnings, *warnings, *further_warnings]


def rewrite_limit_range(limits: Json, old: Json | None = None, *, unit: Unit = Unit.MIB) -> tuple[Json, list[str]]:
    """The rewritten LimitRange, and warnings; parameters as of `rewrite_resource_quota`. Raises InvalidRequest."""
    spec = limits.get("spec") or {}
    rewriting = _Rewriting.from_manifest(limits, _amounts_of_limit_range(old or {}), unit)
    entries = [
        entry
        | {
            name: rewriting.rewrite_amounts(entry[name], f"spec.limits[{i}].{name}")
            for name in _RANGE_FIELDS
            if entry.get(name)
        }
        for i, entry in enumerate(spec.get("limits") or ())
    ]
    warnings = [
        f"spec.limits[{i}].{name}[{names.GPU_MEM}]: Kubernetes adds this to every container and init container of the "
        "namespace, also in pods that need no GPU or a whole one, and ordinary init containers with it are refused. "
        "For "
        f"a default share, annotate the namespace with {names.DEFAULT_GPU_MEM} and label it "
        f"{names.DEFAULTS_LABEL}=enabled"
        for i, entry in enumerate(entries)
        for name in _DEFAULT_FIELDS
        if names.GPU_MEM in (entry.get(name) or {})
    ]
    if not entries:
        return limits, warnings
    return rewriting.annotate(limits | {"spec": spec | {"limits": entries}}), [*rewriting.warnings, *warnings]


@dataclass
class _Rewriting:
    """Rewrites the amounts of one object. `stored_mib`: the numbers that are in MiB already."""

    unit: Unit
    stored_mib: frozenset[Fraction]
    written_mib: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def from_manifest(cls, manifest: Json, stored: Iterable[Json], unit: Unit) -> "_Rewriting":
        """`stored`: the lists of amounts of the stored object."""
        recorded = str(annotations_of(manifest).get(names.WRITTEN_MIB, "")).split(",")
        stored_texts = (str(amounts[key]) for amounts in stored for key in _QUOTA_KEYS if key in amounts)
        return cls(unit, frozenset(_bare_numbers([*recorded, *stored_texts])))

    def rewrite_amounts(self, amounts: Json, path: str) -> Json:
        return amounts | {
            key: self._rewrite_amount(amounts[key], f"{path}[{key}]") for key in _QUOTA_KEYS if key in amounts
        }

    def annotate(self, manifest: Json) -> Json:
        """The object with the annotation. If plain numbers mean MiB, the annotation is removed instead."""
        if self.unit is Unit.MIB or not self.written_mib:
            return manifest
        note = {names.WRITTEN_MIB: ",".join(sorted(self.written_mib))}
        return with_annotations(manifest, annotations_of(manifest) | note)

    def _rewrite_amount(self, text: str | int, path: str) -> str:
        try:
            number, _ = quantity.parse_amount(text)
            # In a quota zero is valid: it allows no share.
            if number == 0:
                return format_count(text, 0)
            with_unit = str(text) if number in self.stored_mib else add_unit(text, self.unit, path)
            mib = format_count(text, quantity.parse_mib(with_unit))
        except InvalidQuantity as error:
            raise InvalidRequest(path, error.problem, error.remedy) from error
        self.written_mib.add(mib)
        if rounding := quantity.describe_rounding(with_unit):
            self.warnings.append(f"{path}: {rounding}")
        if with_unit != str(text):
            self.warnings.append(f"{path}: {text} means GiB here, so it is stored as {mib}, which is in MiB")
        return mib


def _amounts_of_quota(quota: Json) -> Iterator[Json]:
    yield (quota.get("spec") or {}).get("hard") or {}


def _amounts_of_limit_range(limits: Json) -> Iterator[Json]:
    for entry in (limits.get("spec") or {}).get("limits") or ():
        yield from (entry.get(name) or {} for name in _RANGE_FIELDS)


def _bare_numbers(texts: Iterable[str]) -> Iterator[Fraction]:
    """The numbers among the texts that have no unit."""
    for text in texts:
        try:
            number, is_bytes = quantity.parse_amount(text)
        except InvalidQuantity:
            continue
        if not is_bytes:
            yield number


def _refuse_markers(hard: Json) -> None:
    for key in hard:
        if counted_resource(key) in _MARKER_RESOURCES:
            own_names = (names.CLASS_PREFIX + "<class>", names.WHOLE_GPU, names.GPU_MEM)
            remedy = f"write one of {', '.join('requests.' + name for name in own_names)}"
            raise InvalidRequest(f"{_HARD_FIELD}[{key}]", "is an internal marker of Cardwise", remedy)


def _warn_bare_names(hard: Json) -> list[str]:
    """Warnings about names of Cardwise's resources without their domain. Kubernetes refuses these with a message that
    does not help.
    """
    bare = [key for key in hard if "/" not in key and "gpu" in key]
    suggestions_by_name = {key: lookalikes.suggest_resource(names.CLASS_PREFIX + key) for key in bare[:_MAX_COMPARED]}
    return [
        f"{_HARD_FIELD}[{key}]: did you mean requests.{suggestion}?"
        for key, suggestion in suggestions_by_name.items()
        if suggestion in names.REQUESTED
    ]


def _warn_counts_less(written_names: Mapping[str, str]) -> list[str]:
    """Warnings about keys that count less than their name suggests."""
    return [
        f"{_HARD_FIELD}[{written_name}]: counts whole GPUs, as {key}; it does not count shares, even if they are "
        "split over "
        f"several GPUs: limit those by requests.{names.GPU_MEM}, or by a GPUQuota"
        for key, written_name in written_names.items()
        if counted_resource(written_name) == names.GPU_COUNT
    ]


def _warn_unchanged(quota: Json, old: Json | None, record: frozenset[str]) -> list[str]:
    """A warning about an update that changes nothing, such as a patch that removes a bare name."""
    if old is None or not record or quota.get("spec") != old.get("spec") or _metadata_of(quota) != _metadata_of(old):
        return []
    stored = ", ".join(sorted(record))
    warning = (
        f"{_HARD_FIELD}: nothing has changed, because the removed key is stored under another name: remove {stored}"
    )
    return [warning]


def _metadata_of(quota: Json) -> tuple[Json | None, Json | None]:
    metadata = quota.get("metadata") or {}
    return metadata.get("labels"), metadata.get("annotations")


def _keys_of_manifest(manifest: Json) -> dict[str, frozenset[str]]:
    """The keys of `spec.hard` in a manifest, which may be any text."""
    spec = manifest.get("spec")
    hard = spec.get("hard") if isinstance(spec, dict) else None
    return {"hard": frozenset(hard if isinstance(hard, dict) else ())}

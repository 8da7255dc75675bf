"""Rewrites ResourceQuotas and LimitRanges in the same way as the pods that they count.

Amounts of gpu-mem to MiB: Kubernetes adds up plain numbers, so `64Gi` would stand for 68,719,476,736 MiB and limit
nothing. A new number without a unit has the unit of the namespace's pods. A stored number is MiB, so an update that
leaves it unchanged leaves its meaning. Where bare numbers count GiB, what is stored is noted in the annotation
`cardwise.dev/gpu-mem-mib`, for a second call and for copies of the object.

And names of ours to those under which a ResourceQuota counts requests: for names with a domain, Kubernetes counts only
`requests.NAME`, and silently ignores other keys.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from cardwise.core.api import lookalikes, names
from cardwise.core.values import quantity
from cardwise.core.values.decoded import Json, annotated, annotations_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import InvalidQuantity, Unit
from webhook.pods import units
from webhook.pods.mutate import spelling
from webhook.templates import records
from webhook.templates.spellings import Vocabulary, counted, unknown_classes

_QUOTA_KEYS = (names.GPU_MEM, f"requests.{names.GPU_MEM}", f"limits.{names.GPU_MEM}")
_MARKERS = (names.PLACE_MARKER, names.BIND_MARKER)
_HARD = "spec.hard"
_MOST_COMPARED = 8  # names: each is compared with all that there are
_GIVEN = ("default", "defaultRequest")
_RANGE_FIELDS = ("max", "min", *_GIVEN)  # maxLimitRequestRatio is no amount


def resource_quota(
    quota: Json, old: Json | None, vocabulary: Vocabulary, *, update: bool, unit: Unit = Unit.MIB
) -> tuple[Json, list[str]]:
    """The quota, and warnings. `old` is the stored one at an update, `unit` what bare numbers of gpu-mem count.

    Raises InvalidRequest, KubeError.
    """
    spec = quota.get("spec") or {}
    hard = spec.get("hard")
    if not hard:
        return quota, []
    _refuse_markers(hard)
    mib = _Rewriting.of(quota, old, unit)
    record = records.read(quota).get("hard", [])
    place = records.rewrite(
        {_HARD: mib.amounts(hard, _HARD)},
        vocabulary.in_quota,
        place="hard",
        recorded=record,
        manifests=records.applied(quota, old, _named),
        update=update,
        several=True,
    )
    after = mib.noted(quota | {"spec": spec | {"hard": place.amounts[_HARD]}})
    if place.changed:
        after = records.written(after, {"hard": place.ours})
    warnings = unknown_classes(_HARD, place.written, vocabulary)
    told = [*_bare(place.amounts[_HARD]), *_counting_otherwise(place.written), *_left_alone(quota, old, record)]
    return after, [*mib.told, *warnings, *told]


def limit_range(limits: Json, old: Json | None = None, *, unit: Unit = Unit.MIB) -> tuple[Json, list[str]]:
    """As `resource_quota`, of a LimitRange. Raises InvalidRequest."""
    spec = limits.get("spec") or {}
    mib = _Rewriting.of(limits, old, unit)
    items = [
        item | {name: mib.amounts(item[name], f"spec.limits[{i}].{name}") for name in _RANGE_FIELDS if item.get(name)}
        for i, item in enumerate(spec.get("limits") or ())
    ]
    warnings = [
        f"spec.limits[{i}].{name}[{names.GPU_MEM}]: Kubernetes gives this to every container and init container of the "
        "namespace, also of pods that want no card or a whole one; an ordinary init container is refused with it. For "
        f"a default share, annotate the namespace with {names.DEFAULT_GPU_MEM} and label it "
        f"{names.DEFAULTS_LABEL}=enabled"
        for i, item in enumerate(items)
        for name in _GIVEN
        if names.GPU_MEM in (item.get(name) or {})
    ]
    if not items:
        return limits, warnings
    return mib.noted(limits | {"spec": spec | {"limits": items}}), [*mib.told, *warnings]


@dataclass
class _Rewriting:
    """Rewrites the amounts of one object. `stored`: bare numbers that are MiB already."""

    unit: Unit
    stored: frozenset[Fraction]
    made: set[str] = field(default_factory=set)
    told: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, obj: Json, old: Json | None, unit: Unit) -> "_Rewriting":
        noted = str(annotations_of(obj).get(names.WRITTEN_MIB, "")).split(",")
        return cls(unit, frozenset(_values([*noted, *_texts(old or {})])))

    def amounts(self, amounts: Json, path: str) -> Json:
        return amounts | {key: self._amount(amounts[key], f"{path}[{key}]") for key in _QUOTA_KEYS if key in amounts}

    def noted(self, obj: Json) -> Json:
        """The object with the annotation. Where bare numbers count MiB, nobody needs it."""
        if self.unit is Unit.MIB or not self.made:
            return obj
        note = {names.WRITTEN_MIB: ",".join(sorted(self.made))}
        return annotated(obj, annotations_of(obj) | note)

    def _amount(self, text: str | int, path: str) -> str:
        try:
            value, _ = quantity.parse(text)
            # Zero is no request, but a quota that allows none.
            if value == 0:
                return spelling(text, 0)
            meant = str(text) if value in self.stored else units.amount(text, self.unit, path)
            made = spelling(text, quantity.memory(meant))
        except InvalidQuantity as error:
            raise InvalidRequest(path, error.problem, error.remedy) from error
        self.made.add(made)
        if rounding := quantity.rounding(meant):
            self.told.append(f"{path}: {rounding}")
        if meant != str(text):
            self.told.append(f"{path}: {text} counts GiB here, so it is stored as {made}, which counts MiB")
        return made


def _texts(obj: Json) -> Iterator[str]:
    """All amounts of gpu-mem in the object."""
    spec = obj.get("spec") or {}
    listed = (item.get(name) or {} for item in spec.get("limits") or () for name in _RANGE_FIELDS)
    for amounts in (spec.get("hard") or {}, *listed):
        yield from (str(amounts[key]) for key in _QUOTA_KEYS if key in amounts)


def _values(texts: Iterable[str]) -> Iterator[Fraction]:
    """The values of those texts that are bare numbers."""
    for text in texts:
        try:
            value, is_bytes = quantity.parse(text)
        except InvalidQuantity:
            continue
        if not is_bytes:
            yield value


def _refuse_markers(hard: Json) -> None:
    for key in hard:
        if counted(key) in _MARKERS:
            known = (names.CLASS_PREFIX + "<class>", names.WHOLE_GPU, names.GPU_MEM)
            remedy = f"write one of {', '.join('requests.' + name for name in known)}"
            raise InvalidRequest(f"{_HARD}[{key}]", "is a mark that Cardwise sets on some pods for itself", remedy)


def _bare(hard: Json) -> list[str]:
    """Warnings of names of ours without their domain, which Kubernetes refuses in words of its own."""
    bare = [key for key in hard if "/" not in key and "gpu" in key]
    near = {key: lookalikes.meant(names.CLASS_PREFIX + key) for key in bare[:_MOST_COMPARED]}
    return [
        f"{_HARD}[{key}]: did you mean requests.{meant}?" for key, meant in near.items() if meant in names.REQUESTED
    ]


def _counting_otherwise(written: Mapping[str, str]) -> list[str]:
    """Warnings of keys that count less than they may seem to."""
    return [
        f"{_HARD}[{spelled}]: counts cards asked for as a whole, as {key}; a share counts none, also where it is split "
        f"over cards: limit those by requests.{names.GPU_MEM}, or by a GPUQuota"
        for key, spelled in written.items()
        if counted(spelled) == names.GPU_COUNT
    ]


def _left_alone(quota: Json, old: Json | None, record: list[str]) -> list[str]:
    """A warning where an update changes nothing: a patch that takes a bare name away comes here as one."""
    if old is None or not record or quota.get("spec") != old.get("spec") or _about(quota) != _about(old):
        return []
    stored = ", ".join(record)
    told = f"{_HARD}: nothing has changed; what was written by another name is stored as {stored}: take it away by that"
    return [told]


def _about(quota: Json) -> tuple[Json | None, Json | None]:
    metadata = quota.get("metadata") or {}
    return metadata.get("labels"), metadata.get("annotations")


def _named(manifest: Json) -> dict[str, frozenset[str]]:
    """The keys of a manifest, which is a text that anybody wrote."""
    spec = manifest.get("spec")
    hard = spec.get("hard") if isinstance(spec, dict) else None
    return {"hard": frozenset(hard if isinstance(hard, dict) else ())}

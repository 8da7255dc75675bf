"""`cardwise quota`: what a namespace may hold of which cards, what it holds, and which pods hold it.

GPUQuotas count what was really got; beside them stand the lines of Kubernetes' own ResourceQuotas that count what was
asked of our resources, since a pod has to get past both.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cardwise.cli.render import tables
from cardwise.core.api import quotas
from cardwise.core.api.quotas import NOTHING, Charge, Entry, GPUQuota
from cardwise.core.placement.ledger import Holding, Ledger
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube.survey import NativeQuota, Survey


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryView:
    """One entry of a GPUQuota, what its namespace holds of it, and each pod's part of that, the largest first.

    `missing`: why it limits nothing: its class is none.
    """

    quota: GPUQuota
    entry: Entry
    used: Charge
    holders: tuple[tuple[Holding, Charge], ...]
    missing: str = ""


def views(survey: Survey, namespace: str = "") -> list[EntryView]:
    """Every entry of the GPUQuotas of a namespace, or of all, by namespace and name."""
    ledger = survey.ledger
    by_namespace: dict[str, list[Holding]] = {}
    for holding in ledger.holdings():
        if not holding.charged:
            continue
        by_namespace.setdefault(holding.namespace, []).append(holding)
    seen = []
    for quota in sorted(survey.quotas, key=lambda quota: (quota.namespace, quota.name)):
        for entry in quota.entries if namespace in ("", quota.namespace) else ():
            held = [(one, _charge(ledger, one, entry)) for one in by_namespace.get(quota.namespace, ())]
            holders = sorted(
                (part for part in held if part[1] != NOTHING), key=lambda part: (-part[1].memory, part[0].name)
            )
            used = ledger.used(quota.namespace, entry)
            missing = survey.missing(entry.device_class) if entry.device_class else ""
            seen.append(EntryView(quota=quota, entry=entry, used=used, holders=tuple(holders), missing=missing))
    return seen


def by_status(objects: Iterable[Json]) -> list[EntryView]:
    """The entries as the statuses of the GPUQuotas show them, for users who may read no card. A quota that cannot be
    read limits nothing, and is left out.
    """
    seen = []
    for obj in objects:
        try:
            quota = quotas.parse(obj)
        except InvalidRequest:
            continue
        used = quotas.used_by_status(obj)
        for entry in quota.entries:
            charge = used.get((entry.device_class, entry.model), NOTHING)
            seen.append(EntryView(quota=quota, entry=entry, used=charge, holders=()))
    return sorted(seen, key=lambda view: (view.quota.namespace, view.quota.name))


def _charge(ledger: Ledger, holding: Holding, entry: Entry) -> Charge:
    """What one pod takes from the entry."""
    shares = holding.assignment.shares()
    return quotas.total(
        quotas.charge(share) for share in shares if ledger.kinds.covered(ledger.kind(holding.node, share), entry)
    )


def table(seen: Sequence[EntryView], native: Sequence[NativeQuota], *, wide: bool = False) -> str:
    """Used and hard amounts; wide, also the pods."""
    rows = [["NAMESPACE", "GPUQUOTA", "CARDS-OF", "SHARES", "MIB", "WHOLE-CARDS", "ON-EXCEED"]]
    for view in seen:
        hard = quotas.written(view.entry)
        counted = [f"{used}/{hard.get(field, '-')}" for field, used in quotas.written(view.used).items()]
        on_exceed = "Refuse" if view.quota.refuse else "Wait"
        of = quotas.title(view.entry)
        if view.missing:  # amounts would look as if something were limited
            of, counted = f"{of}: {view.missing}", ["-"] * len(counted)
        rows.append([view.quota.namespace, view.quota.name, of, *counted, on_exceed])
    return tables.together([rows, *([_holders(seen)] if wide else []), _native(native)])


def _holders(seen: Sequence[EntryView]) -> list[list[str]]:
    rows = [["NAMESPACE", "GPUQUOTA", "CARDS-OF", "POD", "NODE", "SHARES", "MIB", "WHOLE-CARDS"]]
    for view in seen:
        for holding, part in view.holders:
            name = f"{holding.name} ({holding.mark})" if holding.mark else holding.name
            whose = [view.quota.namespace, view.quota.name, quotas.title(view.entry)]
            rows.append([*whose, name, holding.node, *map(str, part)])
    return rows


def _native(native: Sequence[NativeQuota]) -> list[list[str]]:
    rows = [["NAMESPACE", "RESOURCEQUOTA", "RESOURCE", "USED/HARD"]]
    for quota in sorted(native, key=lambda quota: (quota.namespace, quota.name)):
        for key, hard in sorted(quota.hard.items()):
            rows.append([quota.namespace, quota.name, key, f"{quota.used.get(key, '-')}/{hard}"])
    return rows


def as_json(seen: Sequence[EntryView], native: Sequence[NativeQuota]) -> Json:
    """All of it, for programs."""
    return {
        "gpuQuotas": [_object(view) for view in seen],
        "resourceQuotas": [
            {"namespace": quota.namespace, "name": quota.name, "hard": dict(quota.hard), "used": dict(quota.used)}
            for quota in native
        ],
    }


def _object(view: EntryView) -> Json:
    return {
        "namespace": view.quota.namespace,
        "name": view.quota.name,
        "onExceed": "Refuse" if view.quota.refuse else "Wait",
        **quotas.selection(view.entry),
        "hard": quotas.written(view.entry),
        "used": quotas.written(view.used),
        **({"problem": view.missing} if view.missing else {}),
        "pods": [
            {"name": holding.name, "uid": holding.uid, "node": holding.node, **quotas.written(part)}
            for holding, part in view.holders
        ],
    }

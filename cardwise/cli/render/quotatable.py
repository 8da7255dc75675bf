"""The tables of `cardwise quota`: the GPU quotas of a namespace, the used amounts, and the pods that use them.

GPUQuotas count the amounts that pods hold. The tables also show the entries of Kubernetes' ResourceQuotas that count
requests of Cardwise's resources, because a pod must fit both kinds of quotas.
"""

from collections.abc import Sequence

from cardwise.cli.render import tables
from cardwise.core.api import quotas
from cardwise.core.placement.totals import EntryView
from cardwise.core.values.decoded import Json
from cardwise.kube.clusterstate import NativeQuota


def table(views: Sequence[EntryView], native: Sequence[NativeQuota], *, wide: bool = False) -> str:
    """Format used and hard amounts. `wide`: whether to print also the pods."""
    rows = [["NAMESPACE", "GPUQUOTA", "TYPE", "SHARES", "MIB", "WHOLE-GPUS", "ON-EXCEED"]]
    for view in views:
        hard = quotas.to_fields(view.entry)
        used_of_hard = [f"{used}/{hard.get(field, '-')}" for field, used in quotas.to_fields(view.used).items()]
        on_exceed = "Refuse" if view.quota.refuse else "Wait"
        selection = quotas.entry_title(view.entry)
        if view.missing_class_reason:  # the entry limits nothing, and numbers would suggest a limit
            selection, used_of_hard = f"{selection}: {view.missing_class_reason}", ["-"] * len(used_of_hard)
        rows.append([view.quota.namespace, view.quota.name, selection, *used_of_hard, on_exceed])
    return tables.stack_tables([rows, *([_holder_rows(views)] if wide else []), _native_rows(native)])


def _holder_rows(views: Sequence[EntryView]) -> list[list[str]]:
    rows = [["NAMESPACE", "GPUQUOTA", "TYPE", "POD", "NODE", "SHARES", "MIB", "WHOLE-GPUS"]]
    for view in views:
        for holding, amounts in view.holders:
            quota_cells = [view.quota.namespace, view.quota.name, quotas.entry_title(view.entry)]
            rows.append([*quota_cells, holding.name_with_phase, holding.node, *map(str, amounts)])
    return rows


def _native_rows(native: Sequence[NativeQuota]) -> list[list[str]]:
    rows = [["NAMESPACE", "RESOURCEQUOTA", "RESOURCE", "USED/HARD"]]
    for quota in sorted(native, key=lambda quota: (quota.namespace, quota.name)):
        for key, hard in sorted(quota.hard.items()):
            rows.append([quota.namespace, quota.name, key, f"{quota.used.get(key, '-')}/{hard}"])
    return rows


def as_json(views: Sequence[EntryView], native: Sequence[NativeQuota]) -> Json:
    """The output as JSON, with all fields."""
    return {
        "gpuQuotas": [_entry_as_json(view) for view in views],
        "resourceQuotas": [
            {"namespace": quota.namespace, "name": quota.name, "hard": dict(quota.hard), "used": dict(quota.used)}
            for quota in native
        ],
    }


def _entry_as_json(view: EntryView) -> Json:
    return {
        "namespace": view.quota.namespace,
        "name": view.quota.name,
        "onExceed": "Refuse" if view.quota.refuse else "Wait",
        **quotas.entry_selection(view.entry),
        "hard": quotas.to_fields(view.entry),
        "used": quotas.to_fields(view.used),
        **({"problem": view.missing_class_reason} if view.missing_class_reason else {}),
        "pods": [
            {"name": holding.name, "uid": holding.uid, "node": holding.node, **quotas.to_fields(amounts)}
            for holding, amounts in view.holders
        ],
    }

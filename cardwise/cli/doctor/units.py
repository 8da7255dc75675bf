"""Compare the unit of gpu-mem numbers with the unit of an installed gpushare."""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from cardwise.cli.doctor.facts import Facts, is_infrastructure, namespaced_name
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.core.api import names
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json, labels_of
from cardwise.core.values.quantity import Unit

_MAX_LISTED: Final = 3
_GPUSHARE_PLUGIN: Final = "gpushare-device-plugin"
# gpushare's option, in the syntax of Go's package flag.
_UNIT_FLAG: Final = re.compile(r"(?<!\S)--?memory-unit(?:=|\s+)['\"]?(\w+)")
_POD_WEBHOOK: Final = f"pods.{names.GROUP}"  # the name of the webhook for pods, whose URL path contains the unit
_GIB_PATH: Final = "/gib"


def check_bare_numbers(facts: Facts) -> Iterator[Finding]:
    """Check that `aliyun.com/gpu-mem: 2` has the unit that its author expects."""
    namespaces_by_unit: dict[Unit, list[str]] = {unit: [] for unit in Unit}
    for namespace in facts.namespaces:
        name, unit_label = namespace["metadata"]["name"], labels_of(namespace).get(names.GPU_MEM_UNIT)
        if unit_label in list(Unit):
            namespaces_by_unit[Unit(unit_label)].append(name)
        elif unit_label is not None:
            label = f"its label {names.GPU_MEM_UNIT} is {wording.quote_text(unit_label)}"
            text = f"namespace {name}: {label}, which is not a unit and is ignored"
            yield Finding("gpu-mem-unit", Severity.WARNING, text, "write MiB or GiB, or remove the label")
    own_unit = _configured_unit(facts.mutating_webhooks)
    gpushare_units = {
        namespaced_name(daemonset): _gpushare_unit(daemonset)
        for daemonset in (*facts.daemonsets, *facts.other_daemonsets)
        if _GPUSHARE_PLUGIN in daemonset["metadata"]["name"] and is_infrastructure(facts, daemonset)
    }
    if own_unit is None and "mutating_webhooks" in facts.unread_kinds:
        return
    if own_unit is None:
        for name, unit in gpushare_units.items():
            text = f"gpushare counts {names.GPU_MEM} in {unit} (--memory-unit of DaemonSet {name})"
            yield Finding("gpu-mem-unit", Severity.NOTE, text, f"install Cardwise with webhook.gpuMemUnit={unit}")
        return
    other_units = {name: unit for name, unit in gpushare_units.items() if unit is not own_unit}
    for name, unit in other_units.items():
        yield Finding(
            "gpu-mem-unit",
            Severity.WARNING,
            f"gpushare counts {names.GPU_MEM} in {unit} (--memory-unit of DaemonSet {name}), Cardwise in {own_unit}: a "
            f"number without a unit, such as {names.GPU_MEM}: 2, means {own_unit} now",
            f"set webhook.gpuMemUnit={unit}, or label namespaces {names.GPU_MEM_UNIT}={unit} one by one; and add the "
            "unit to existing ResourceQuotas and LimitRanges (docs/migration.md)",
        )
    if not other_units:
        other_unit_namespaces = [
            name for unit, names_in_unit in namespaces_by_unit.items() if unit is not own_unit for name in names_in_unit
        ]
        other_unit = Unit.MIB if own_unit is Unit.GIB else Unit.GIB
        other_unit_note = (
            f", in {wording.enumerate_first(other_unit_namespaces, _MAX_LISTED)} {other_unit}"
            if other_unit_namespaces
            else ""
        )
        yield Finding(
            "gpu-mem-unit", Severity.OK, f"numbers without a unit in {names.GPU_MEM} mean {own_unit}{other_unit_note}"
        )


def _configured_unit(configurations: Sequence[Json]) -> Unit | None:
    """Return the chart's value webhook.gpuMemUnit, from the webhook's configuration; None if it does not exist."""
    for configuration in configurations:
        for hook in configuration.get("webhooks") or ():
            client = hook.get("clientConfig") or {}
            if configuration["metadata"]["name"] == names.WEBHOOK_CONFIGURATION and hook.get("name") == _POD_WEBHOOK:
                path = str((client.get("service") or {}).get("path") or client.get("url") or "")
                return Unit.GIB if path.endswith(_GIB_PATH) else Unit.MIB
    return None


def _gpushare_unit(daemonset: Json) -> Unit:
    """Return the unit of gpushare's device plugin: GiB, unless its option says otherwise (`cmd/nvidia/main.go`)."""
    containers = daemonset.get("spec", {}).get("template", {}).get("spec", {}).get("containers") or ()
    words = " ".join(
        str(word)
        for container in containers
        for word in (*(container.get("command") or ()), *(container.get("args") or ()))
    )
    flags = _UNIT_FLAG.findall(words)
    return Unit.MIB if flags and flags[-1] == Unit.MIB else Unit.GIB

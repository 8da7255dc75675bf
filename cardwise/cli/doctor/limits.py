"""Checks of ResourceClasses without GPUs, and of ResourceQuotas that miss some requests."""

from collections.abc import Iterator, Sequence
from typing import Final

from cardwise.cli.doctor.facts import Facts, namespaced_name
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.core.api import lookalikes, names, quotas
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json, labels_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.shellcommand import command
from cardwise.core.values.wording import quote_unless_name

_MAX_LISTED: Final = 5


def check_classes_without_cards(facts: Facts) -> Iterator[Finding]:
    """Find classes without cards.

    Automatic classes stay after their last card was removed: pods may wait for a node group that is scaled to zero.
    """
    empty_classes = [
        resource_class["metadata"]["name"]
        for resource_class in facts.classes
        if labels_of(resource_class).get(names.AUTO_LABEL) == "true"
        and (resource_class.get("status") or {}).get("devices") == 0
    ]
    if empty_classes:
        pronoun = "it" if len(empty_classes) == 1 else "them"
        text = (
            f"no GPU matches {wording.enumerate_first(empty_classes, _MAX_LISTED)}: pods that "
            f"request {pronoun} wait until a node brings one"
        )
        delete = command("kubectl delete resourceclass {name}", name=empty_classes[0])
        remedy = f"remove a type that will not return: {delete}"
        yield Finding("classes", Severity.NOTE, text, remedy)


def check_resource_quotas(facts: Facts) -> Iterator[Finding]:
    """Find ResourceQuotas that do not count what their authors expect.

    Such a ResourceQuota names a resource that no node offers, or counts only shares, or only whole cards.
    """
    if facts.unread_kinds.keys() & {"resourcequotas", "gpuquotas", "nodes", "classes"}:
        return
    offered_names = {
        name
        for node in facts.nodes
        for name, amount in ((node.get("status") or {}).get("capacity") or {}).items()
        if lookalikes.is_like_gpu(name) and amount != "0"
    }
    class_names = [resource_class["metadata"]["name"] for resource_class in facts.classes]
    keys_by_namespace: dict[str, set[str]] = {}
    for quota in facts.resourcequotas:
        hard = (quota.get("spec") or {}).get("hard") or {}
        keys_by_namespace.setdefault(quota["metadata"]["namespace"], set()).update(hard)
        for key in sorted(hard):
            if suggested_name := _suggest_key(key, offered_names, class_names):
                text = (
                    f"ResourceQuota {namespaced_name(quota)}: {quote_unless_name(key)} counts nothing, because no "
                    "node offers it"
                )
                yield Finding("quotas", Severity.WARNING, text, f"did you mean requests.{suggested_name}?")
    for missing_key, counted_key in (
        (quotas.WHOLE_CARDS_QUOTA_KEY, quotas.SHARES_QUOTA_KEY),
        (quotas.SHARES_QUOTA_KEY, quotas.WHOLE_CARDS_QUOTA_KEY),
    ):
        uncovered_namespaces = sorted(
            namespace
            for namespace, keys in keys_by_namespace.items()
            if quotas.unlimited_amount_key(keys) == missing_key
            and not _is_counted_by_gpuquota(facts.gpuquotas, namespace, missing_key)
        )
        if uncovered_namespaces:
            uncounted_requests = (
                "whole GPUs (gpu-count or a class)" if missing_key == quotas.WHOLE_CARDS_QUOTA_KEY else "shares"
            )
            text = (
                f"{wording.enumerate_first(uncovered_namespaces, _MAX_LISTED)}: a ResourceQuota limits "
                f"{counted_key}, but not {uncounted_requests}"
            )
            yield Finding("quotas", Severity.WARNING, text, f"add {missing_key} to it, or create a GPUQuota")


def _suggest_key(key: str, offered_names: set[str], classes: list[str]) -> str | None:
    """Return the resource that a ResourceQuota's author probably meant by a key that counts nothing; None if none."""
    name = key.removeprefix("requests.")
    is_own = name in (*names.REQUESTED, *names.OWN_RESOURCES) or names.class_of(name)
    if is_own or name in offered_names or not lookalikes.is_like_gpu(name):
        return None
    suggested_name = lookalikes.suggest_resource(name, (*sorted(offered_names), *classes))
    if not suggested_name:
        return None
    return suggested_name if "/" in suggested_name else f"{names.CLASS_PREFIX}{suggested_name}"


def _is_counted_by_gpuquota(gpu_quotas: Sequence[Json], namespace: str, missing_key: str) -> bool:
    """Whether a GPUQuota of the namespace limits the resource that its ResourceQuotas do not count."""
    for manifest in gpu_quotas:
        if manifest["metadata"]["namespace"] != namespace:
            continue
        try:
            if quotas.counts_in_place_of(quotas.parse(manifest), missing_key):
                return True
        except InvalidRequest:
            continue
    return False

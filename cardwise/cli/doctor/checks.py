"""Runs the checks in order: a later one relies on the earlier ones."""

from collections.abc import Iterator

from cardwise.cli.doctor import (
    cluster,
    exposure,
    facts,
    finding,
    limits,
    parts,
    probing,
    repairs,
    scheduler,
    startup,
    units,
    waiting,
)
from cardwise.cli.doctor.facts import Facts
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.kube.client import KubeClient

_CHECKS = (
    cluster.version,
    parts.definitions,
    startup.uncreated,
    startup.scaled_down,
    startup.unready,
    parts.webhooks,
    parts.open_webhook,
    parts.policies,
    parts.leader,
    scheduler.stranded,
    scheduler.unwired,
    scheduler.deleted,
    waiting.unrewritten,
    cluster.other_plugins,
    cluster.gpushare,
    units.bare_numbers,
    parts.cards,
    cluster.closed_nodes,
    limits.classes_without_cards,
    limits.resource_quotas,
    cluster.runtimes,
    parts.mps,
    cluster.clocks,
)

# All of them where Cardwise is not installed.
_BEFORE = (
    cluster.version,
    parts.definitions,
    scheduler.stranded,
    cluster.other_plugins,
    cluster.gpushare,
    units.bare_numbers,
)


def examine(client: KubeClient, installed: str, probe_in: str = "", image: str = "") -> list[Finding]:
    """In the order in which to mend them. `installed`: the namespace of Cardwise. `probe_in`: as pods of which
    namespace to send the probes; "": none. `image`: of those that look for cards on nodes; "": that of the device
    plugin.

    Raises `errors.KubeError` where nothing at all can be read.
    """
    seen = facts.read_facts(client, installed)
    findings = [*judge(seen), *_schedulers(client, seen)]
    if parts.is_installed(seen) is False or any(parts.in_another_namespace(seen)):
        return finding.sort_findings(findings)
    if probe_in in waiting.exempt_namespaces(seen):
        text = f"no probe pod was sent: the webhook is not asked about pods of namespace {probe_in}, which is exempt"
        findings.append(
            Finding("probe", Severity.NOTE, text, "name a namespace of users: cardwise doctor -n NAMESPACE")
        )
    elif probe_in:
        wire, renew = repairs.wire_scheduler(seen), repairs.renew_certificates(seen)
        findings += probing.send_probe(client, probe_in, installed, wire=wire, renew=renew)
        findings += exposure.check_exposure(client, probe_in, installed, seen, image=image)
    return finding.sort_findings(findings)


def judge(seen: Facts) -> Iterator[Finding]:
    """All that follows from what was read."""
    is_installed = parts.is_installed(seen) is not False
    if is_installed and (mistaken := [*parts.in_another_namespace(seen)]):
        yield from mistaken  # else all would be missing there
    else:
        for check in _CHECKS if is_installed else _BEFORE:
            yield from check(seen)
    yield from finding.report_unread(seen.unread, facts.KINDS)


def _schedulers(client: KubeClient, seen: Facts) -> Iterator[Finding]:
    for pod in seen.schedulers:
        name = pod["metadata"]["name"]
        config = facts.read_configz(client, pod)
        if config is None:
            text = f"{name} does not tell its configuration (kubeadm binds it to loopback)"
            yield Finding("scheduler", Severity.NOTE, text, "the probe pod tells whether it asks the extender")
        else:
            yield from scheduler.check_wiring(config, name, repairs.wire_scheduler(seen))

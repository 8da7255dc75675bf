"""Run the checks in their order: later checks rely on earlier ones."""

from collections.abc import Iterator

from cardwise.cli.doctor import (
    claims,
    cluster,
    components,
    exposure,
    facts,
    finding,
    limits,
    policies,
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
    cluster.check_kubernetes_version,
    components.check_definitions,
    startup.check_uncreated_pods,
    startup.check_scaled_down,
    startup.check_unready_pods,
    components.check_webhooks,
    components.check_webhook_exposure,
    policies.check_policies,
    components.check_leader,
    scheduler.check_stranded_pods,
    scheduler.check_unconfigured_control_planes,
    scheduler.check_deleted_pods,
    claims.check_claims,
    claims.check_former_mode,
    waiting.check_unrewritten_pods,
    waiting.check_unmet_demands,
    cluster.check_other_plugins,
    cluster.check_gpushare_leftovers,
    units.check_bare_numbers,
    components.check_cards,
    cluster.check_unschedulable_nodes,
    limits.check_classes_without_cards,
    limits.check_resource_quotas,
    cluster.check_runtimes,
    components.check_mps,
    cluster.check_clocks,
)

# The only checks that are run if Cardwise is not installed.
_CHECKS_BEFORE_INSTALL = (
    cluster.check_kubernetes_version,
    components.check_definitions,
    scheduler.check_stranded_pods,
    claims.check_former_mode,
    cluster.check_other_plugins,
    cluster.check_gpushare_leftovers,
    units.check_bare_numbers,
)


def run_all_checks(
    client: KubeClient, cardwise_namespace: str, dry_run_namespace: str = "", image: str = ""
) -> list[Finding]:
    """Run all checks, in the order in which to fix their findings. Raises `errors.KubeError` if nothing can be read.

    cardwise_namespace: the namespace of Cardwise.
    dry_run_namespace: the namespace of the probe pods' dry run; "" for no probes.
    image: the image of the pods that look for GPUs on nodes; "" for the image of the device plugin.
    """
    cluster_facts = facts.read_facts(client, cardwise_namespace)
    findings = [*check_facts(cluster_facts), *_check_schedulers(client, cluster_facts)]
    if components.is_installed(cluster_facts) is False or any(components.check_namespace(cluster_facts)):
        return finding.sort_findings(findings)
    if dry_run_namespace in waiting.exempt_namespaces(cluster_facts):
        text = f"no probe pod was created: namespace {dry_run_namespace} is exempt from the webhook"
        findings.append(
            Finding("probe", Severity.NOTE, text, "name a namespace that is not exempt: cardwise doctor -n NAMESPACE")
        )
    elif dry_run_namespace:
        configuration_remedy, renewal_remedy = (
            repairs.suggest_scheduler_configuration(cluster_facts),
            repairs.suggest_certificate_renewal(cluster_facts),
        )
        findings += probing.run_probe_pod(
            client,
            dry_run_namespace,
            cardwise_namespace,
            configuration_remedy=configuration_remedy,
            renewal_remedy=renewal_remedy,
        )
        findings += exposure.check_exposure(client, dry_run_namespace, cardwise_namespace, cluster_facts, image=image)
    return finding.sort_findings(findings)


def check_facts(cluster_facts: Facts) -> Iterator[Finding]:
    """Run all checks that need only the facts."""
    is_installed = components.is_installed(cluster_facts) is not False
    if is_installed and (namespace_findings := [*components.check_namespace(cluster_facts)]):
        # In the wrong namespace the other checks would only report that everything is missing.
        yield from namespace_findings
    else:
        for check in _CHECKS if is_installed else _CHECKS_BEFORE_INSTALL:
            yield from check(cluster_facts)
    yield from finding.report_unread_kinds(cluster_facts.unread_kinds, facts.KIND_COUNT)


def _check_schedulers(client: KubeClient, cluster_facts: Facts) -> Iterator[Finding]:
    # With claims no kube-scheduler calls the extender.
    for pod in () if claims.uses_claims(cluster_facts) else cluster_facts.schedulers:
        name = pod["metadata"]["name"]
        config = facts.read_configz(client, pod)
        if config is None:
            text = f"{name} does not show its configuration (kubeadm binds it to the loopback address)"
            yield Finding("scheduler", Severity.NOTE, text, "the probe pod shows whether it calls the extender")
        else:
            yield from scheduler.check_scheduler_configuration(
                config, name, repairs.suggest_scheduler_configuration(cluster_facts)
            )

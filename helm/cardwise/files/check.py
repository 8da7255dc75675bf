"""The script of `helm test`: checks that the API server and kube-scheduler call Cardwise. Runs in Cardwise's image.

Creates one pod with 1 MiB, whose image is never pulled, and deletes it again. Changes nothing else.

Prints one line per check, with a remedy if the check fails. Exit status 1 if a check fails.
"""

import argparse
import http.client
import json
import ssl
import sys
import urllib.parse
from collections.abc import Callable
from pathlib import Path

from cardwise.cli.doctor import components, facts, finding, probing, startup
from cardwise.cli.doctor.finding import Severity
from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names, request
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

TLS_DIR = Path("/etc/cardwise/extender-tls")
REPORT_TIMEOUT_SECONDS = 60.0  # a device plugin that has just been installed reports its GPUs within this time


def check_admission(client: KubeClient, namespace: str) -> str:
    """Create a pod with a share by server-side dry run, and check that the webhook has changed it.

    Raises LookupError if the webhook did not see the pod.
    """
    limits = {names.GPU_MEM: "1Gi"}
    container = {
        "name": "main",
        "image": "none",
        "resources": {"limits": limits},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security_context = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {
        "metadata": {"generateName": "cardwise-test-", "namespace": namespace},
        "spec": {"containers": [container], "securityContext": security_context},
    }
    created = client.create(paths.pods(namespace), pod, query={"dryRun": "All"})
    stored_container = next(request.containers(created))
    stored_limits = stored_container.spec["resources"]["limits"]
    if stored_limits.get(names.GPU_MEM) != "1024" or not request.has_slot(stored_container):
        raise LookupError(
            f"the webhook did not change the pod ({stored_limits}); check webhook.exemptNamespaces and tests.namespace"
        )
    return (
        f"1Gi became {stored_limits[names.GPU_MEM]} MiB, and the pod's scheduler is {created['spec']['schedulerName']}"
    )


def check_extender(url: str) -> str:
    """Read the extender's list of GPUs with kube-scheduler's certificate. Raises LookupError without an answer."""
    context = ssl.create_default_context(cafile=str(TLS_DIR / "ca.crt"))
    context.load_cert_chain(TLS_DIR / "client.crt", TLS_DIR / "client.key")
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPSConnection(address.hostname or "", address.port, timeout=10, context=context)
    connection.request("GET", f"{names.EXTENDER_PREFIX}/inspect")
    response = connection.getresponse()
    body = response.read()
    if response.status != http.client.OK:
        raise LookupError(f"the extender answered {response.status} {body[:200].decode(errors='replace')}; see its log")
    nodes = json.loads(body).get("nodes") or ()
    return f"the extender knows the GPUs of {len(nodes)} node{'s' * (len(nodes) != 1)}"


def check_scheduler(client: KubeClient, namespace: str, cardwise_namespace: str) -> str:
    """Let kube-scheduler place a probe pod, as `cardwise doctor` does. Raises LookupError if it fails."""
    findings = list(probing.run_probe_pod(client, namespace, cardwise_namespace))
    worst_finding = finding.sort_findings(findings)[0]
    if worst_finding.level is Severity.PROBLEM:
        raise LookupError(f"{worst_finding.text}; {worst_finding.remedy} (scheduler.mode)")
    return worst_finding.text if worst_finding.level is not Severity.OK else findings[-1].text


def check_gpus(client: KubeClient, cardwise_namespace: str, clock: Clock = SYSTEM) -> str:
    """Count the healthy GPUs that device plugins have reported. Waits for the first report.

    `helm install --wait` of Helm 3 does not wait for the last pod of a DaemonSet, so the device plugin may be starting.

    Raises LookupError, with the findings of `cardwise doctor`, if no GPU is reported in `REPORT_TIMEOUT_SECONDS`, or if
    none is healthy.
    """
    deadline = clock.now() + REPORT_TIMEOUT_SECONDS
    while not (gpus := list(client.list_objects(paths.extendedresources()))):
        cluster_facts = facts.Facts(cardwise_namespace=cardwise_namespace, now=client.fetch_server_time())
        facts.collect_lists(cluster_facts, client, facts.build_part_queries(cardwise_namespace))
        causes = [*startup.check_uncreated_pods(cluster_facts), *startup.check_unready_pods(cluster_facts)]
        if causes or cluster_facts.unread_kinds or clock.now() >= deadline:
            causes = causes or [*components.check_cards(cluster_facts)]
            raise LookupError("; ".join(f"{cause.text}; {cause.remedy}" for cause in causes))
        clock.sleep(1)
    healthy_count = sum(gpu.get("status", {}).get("health") == "Healthy" for gpu in gpus)
    if not healthy_count:
        reasons = {gpu.get("status", {}).get("reason", "") for gpu in gpus}
        raise LookupError(f"0 of {len(gpus)} healthy: {'; '.join(sorted(reasons))}")
    return f"{healthy_count} of {len(gpus)} healthy"


def run_check(name: str, check: Callable[[], str]) -> bool:
    """Run a check and print its outcome. Returns whether it passed."""
    try:
        print(f"ok    {name}: {check()}")
    except (LookupError, OSError, errors.KubeError, http.client.HTTPException) as error:
        print(f"FAIL  {name}: {error}")
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--extender", default="")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--cardwise-namespace", required=True)
    arguments = parser.parse_args()
    client = KubeClient.load(None)
    outcomes = [run_check("GPUs", lambda: check_gpus(client, arguments.cardwise_namespace))]
    outcomes += [run_check("admission", lambda: check_admission(client, arguments.namespace))]
    if arguments.extender:
        outcomes += [run_check("extender", lambda: check_extender(arguments.extender))]
    namespaces = (arguments.namespace, arguments.cardwise_namespace)
    outcomes += [run_check("kube-scheduler", lambda: check_scheduler(client, *namespaces))]
    sys.exit(0 if all(outcomes) else 1)


if __name__ == "__main__":
    main()

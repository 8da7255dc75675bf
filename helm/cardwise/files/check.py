"""What `helm test` runs: is Cardwise asked, and does it answer? In the image of the parts.

It changes nothing but for one pod of 1 MiB, whose image is never pulled, and which it deletes again.

A line for each question, with what to do where the answer is no; exit status 1 when one is.
"""

import argparse
import http.client
import json
import ssl
import sys
import urllib.parse
from collections.abc import Callable
from pathlib import Path

from cardwise.cli.doctor import facts, finding, parts, probing, startup
from cardwise.cli.doctor.finding import Severity
from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient

TLS = Path("/etc/cardwise/extender-tls")
CARDS_SECONDS = 60.0  # until a device plugin that has just been installed has reported its cards


def admission(client: KubeClient, namespace: str) -> str:
    """A pod with a share, which is not stored."""
    limits = {names.GPU_MEM: "1Gi"}
    container = {
        "name": "main",
        "image": "none",
        "resources": {"limits": limits},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {
        "metadata": {"generateName": "cardwise-test-", "namespace": namespace},
        "spec": {"containers": [container], "securityContext": security},
    }
    created = client.create(paths.pods(namespace), pod, query={"dryRun": "All"})
    stored_limits = created["spec"]["containers"][0]["resources"]["limits"]
    if stored_limits.get(names.GPU_MEM) != "1024" or names.SHARE not in stored_limits:
        raise LookupError(
            f"the pod passed as it was ({stored_limits}); look at webhook.exemptNamespaces and tests.namespace"
        )
    return f"1Gi became {stored_limits[names.GPU_MEM]} MiB, as for scheduler {created['spec']['schedulerName']}"


def extender(url: str) -> str:
    """Its list of cards, asked as kube-scheduler asks."""
    context = ssl.create_default_context(cafile=str(TLS / "ca.crt"))
    context.load_cert_chain(TLS / "client.crt", TLS / "client.key")
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPSConnection(address.hostname or "", address.port, timeout=10, context=context)
    connection.request("GET", f"{names.EXTENDER_PREFIX}/inspect")
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != http.client.OK:
        raise LookupError(f"it answered {answer.status} {body[:200].decode(errors='replace')}; see its log")
    nodes = json.loads(body).get("nodes") or ()
    return f"it knows the cards of {len(nodes)} node{'s' * (len(nodes) != 1)}"


def scheduler(client: KubeClient, namespace: str, own: str) -> str:
    """A pod that kube-scheduler places, as `cardwise doctor` sends it. `own`: the namespace of Cardwise."""
    findings = list(probing.send_probe(client, namespace, own))
    worst = finding.sort_findings(findings)[0]
    if worst.level is Severity.PROBLEM:
        raise LookupError(f"{worst.text}; {worst.remedy} (scheduler.mode)")
    return worst.text if worst.level is not Severity.OK else findings[-1].text


def cards(client: KubeClient, own: str, clock: Clock = SYSTEM) -> str:
    """What the device plugins have reported; if nothing after a while, why, as `cardwise doctor` says it.

    The device plugin may be starting: `helm install --wait` of Helm 3 does not wait for the last pod of a DaemonSet.
    """
    deadline = clock.now() + CARDS_SECONDS
    while not (resources := list(client.objects(paths.extendedresources()))):
        seen = facts.Facts(installed=own, now=client.clock())
        facts.collect_lists(seen, client, facts.queries_of_parts(own))
        causes = [*startup.check_uncreated_pods(seen), *startup.check_unready_pods(seen)]
        if causes or seen.unread or clock.now() >= deadline:
            raise LookupError("; ".join(f"{cause.text}; {cause.remedy}" for cause in causes or parts.check_cards(seen)))
        clock.sleep(1)
    healthy = sum(resource.get("status", {}).get("health") == "Healthy" for resource in resources)
    if not healthy:
        reasons = {resource.get("status", {}).get("reason", "") for resource in resources}
        raise LookupError(f"0 of {len(resources)} healthy: {'; '.join(sorted(reasons))}")
    return f"{healthy} of {len(resources)} healthy"


def run_check(question: str, check: Callable[[], str]) -> bool:
    """Prints question and answer; whether it was a good one."""
    try:
        print(f"ok    {question}: {check()}")
    except (LookupError, OSError, errors.KubeError, http.client.HTTPException) as error:
        print(f"FAIL  {question}: {error}")
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--extender", default="")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--cardwise-namespace", required=True)
    arguments = parser.parse_args()
    client = KubeClient.load(None)
    good = [run_check("cards", lambda: cards(client, arguments.cardwise_namespace))]
    good += [run_check("admission", lambda: admission(client, arguments.namespace))]
    if arguments.extender:
        good += [run_check("extender", lambda: extender(arguments.extender))]
    good += [run_check("kube-scheduler", lambda: scheduler(client, arguments.namespace, arguments.cardwise_namespace))]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()

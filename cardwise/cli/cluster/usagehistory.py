"""Reads what containers have used in the last hours, from the MPS managers of all nodes."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from cardwise.cli.cluster import usage
from cardwise.cli.cluster.usage import UnreadableUse
from cardwise.core.api import names
from cardwise.core.values import wording
from cardwise.gpus import usagereport
from cardwise.gpus.usagereport import UsageReport
from cardwise.kube import errors
from cardwise.kube.client import KubeClient

_MAX_PARALLEL_REQUESTS = 8  # maximum number of requests at the same time
_MAX_LISTED = 3  # maximum number of nodes that a note names


@dataclass(slots=True)
class UsageHistory:
    """The reports of the nodes. source: where they come from. notes: what could not be read."""

    source: str = "the nodes' MPS managers remember"
    reports: list[UsageReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_history(client: KubeClient, cardwise_namespace: str = names.NAMESPACE) -> UsageHistory:
    """Read the reports of all MPS managers. The user needs the right to get `pods/proxy` in Cardwise's namespace."""
    history = UsageHistory()
    try:
        managers = usage.list_manager_pods(client, cardwise_namespace)
    except errors.KubeError as error:
        problem = error.message or error.reason
        history.notes.append(f"no use is known: the MPS managers in {cardwise_namespace} cannot be listed: {problem}")
        return history
    if not managers:
        history.notes.append(f"no use is known: no MPS manager runs in namespace {cardwise_namespace}")
        return history
    failed_nodes: list[str] = []
    last_problem = ""
    with ThreadPoolExecutor(_MAX_PARALLEL_REQUESTS) as pool:
        answers = pool.map(lambda pod: _read_report(client, cardwise_namespace, pod), managers.values())
        for node, answer in zip(managers, answers, strict=True):
            if isinstance(answer, UnreadableUse):
                failed_nodes.append(node)
                last_problem = answer.problem
            else:
                history.reports.append(answer)
    if failed_nodes:
        nodes = wording.enumerate_first(sorted(failed_nodes), _MAX_LISTED, "node")
        history.notes.append(f"the use on {nodes} is unknown: {last_problem}")
    return history


def _read_report(client: KubeClient, cardwise_namespace: str, manager: str) -> UsageReport | UnreadableUse:
    """The report of a manager."""
    try:
        return usagereport.decode_report(usage.read_manager(client, cardwise_namespace, manager, usagereport.PATH))
    except errors.KubeError as error:
        return UnreadableUse(error.message or error.reason)
    except ValueError as error:
        return UnreadableUse(f"its MPS manager sent an unreadable report ({error})")

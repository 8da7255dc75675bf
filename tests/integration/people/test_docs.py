"""The commands of the documents, typed on a real cluster in the order of their page. What cannot be typed here says
where it is tried instead. Where a page shows output, the command prints these lines in this order, names and numbers
aside.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from cardwise.core.api import classes, names
from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from tests.cluster import Cluster
from tests.cluster.processes import PATIENCE, wait_for
from tests.integration.commands import typed
from tests.integration.sharing import Space, workload

pytestmark = [pytest.mark.cluster("nodes"), pytest.mark.node, pytest.mark.in_order]

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "reference").glob("*.md"))]

# What begins so is tried elsewhere.
ELSEWHERE = {
    "make ": "make demo is test_demo.py, make test is what runs this",
    "git clone ": "what runs this is a clone",
    "docker ": "needs an engine: tests/helm holds the Dockerfile",
    "helm ": "chart/test_chart.py",
    "kubectl create namespace cardwise-system": "before helm, and it is there already: tests/helm/test_notes.py",
    "kubectl logs cardwise-test": "helm test leaves that pod: chart/test_chart.py",
    "kubectl delete -f cleanup.yaml": "after an uninstallation: chart/test_chart.py",
    "kubectl create -f cleanup.yaml": "after an uninstallation: chart/test_chart.py",
    "kubectl logs -n cardwise-system job/cardwise-cleanup": "after an uninstallation: chart/test_chart.py",
    "kubectl logs -n cardwise-system job/cardwise-kubeadm": "of scheduler.mode=kubeadm: tests/helm/test_kubeadm.py",
    "nvidia-ctk ": "on a node: node/test_nvidia_runtime.py",
    "pipx ": "not on each machine: tests/release installs the wheel",
    "cardwise simulate openb": "the trace is not shipped: tests/cli/commands/test_simulate.py",
    "cardwise web": "serves until Ctrl-C: tests/web",
    "cardwise defrag --fit": "more CPUs than the nodes have here: tests/cli/commands/test_defrag.py",
    "curl --unix-socket": "in a container: node/test_agent.py",
    "python -m cardwise.share": "in a container: tests/share",
    "cardwise report --prometheus": "a Prometheus: tests/observability/test_recorded_use.py",
    "cardwise advise -n team-a --prometheus": "as cardwise report",
    "kubectl -n monitoring port-forward": "as cardwise report",
    "cardwise advise -n team-a deploy/web": "a workload that computes: chart/test_again.py",
    "kubectl create configmap tenant": "a real GPU: tests/realcard",
    "kubectl apply -f examples/isolation": "a real GPU: tests/realcard",
    "kubectl exec -it victim": "a real GPU: tests/realcard",
    "kubectl exec neighbour": "a real GPU: tests/realcard",
    "kubectl -n cardwise-system port-forward": "a Service of the chart: chart/test_chart.py, chart/test_metrics.py",
}
ANNS_ROLE = "cardwise-inspect-system:serviceaccount:first-hour:ann"
VIEW = "kubectl create clusterrolebinding cardwise-view --clusterrole=cardwise-view --group=GROUP"  # of admin.md
OTHER_PAGES = {"migration.md": "chart/test_migration.py types them"}

# What the reader of a page leaves behind, in the way of other pages.
LEFT = {"README.md": ["kubectl delete pod notebook"]}

# What a page names that everybody has under names of one's own, and what it is here; and the one deadline of all waits.
HERE = {
    "GPU-8dc8a2a1": "{card}",
    "gpu-8dc8a2a1-…": "{resource}",
    "help.tar.gz": "{folder}/help.tar.gz",
    "job/slurp": "pod/slurp-0",  # of two pods here, of a Job on the page
    "kubectl wait ": f"kubectl wait --timeout={PATIENCE:.0f}s ",
    " --timeout=120s": "",
}

# Objects that a page takes for granted.
CLASSES = {"nvidia.tesla.k80", "nvidia.tesla.v100"}  # of the cards that there are
BINDINGS = ["cardwise-view", "operators-drain", "defrag"]  # that pages make
MARKS = ("unschedulable", "cordon")  # that pages leave on cards
SLURP = {
    f"slurp-{i}": {"scheduling.k8s.io/group-name": "slurp", "scheduling.k8s.io/group-pod-num": "2"} for i in range(2)
}


# Shown output that is of another cluster than the tests', by page and command.
OF_OTHERS = {
    ("README.md", "cardwise explain pod notebook"): "MPS runs there, and no other pod",
    ("quickstart.md", "cardwise explain pod notebook"): "as in README.md",
    ("quickstart.md", "cardwise inspect"): "it has one GPU",
    ("defrag.md", "cardwise defrag --free-gpus 1"): "pods there hold a part of every GPU",
}


def typed_lines(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The lines of its console blocks, each with the lines that the page shows below it.

    A block that shows output has a prompt, `$`, before each command.
    """
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        if not any(line.startswith("$ ") for line in lines):
            yield from ((line, []) for line in lines)
            continue
        for part in "\n".join(lines).removeprefix("$ ").split("\n$ "):
            command, *output = part.split("\n")
            yield command, output


def commands(page: Path) -> list[str]:
    """Those of its lines that are typed here."""
    return [line for line, _ in typed_lines(page) if not line.startswith(tuple(ELSEWHERE))]


def _pattern(line: str) -> str:
    """Matches the line with other numbers, names with numbers and widths, in any namespace in place of `default`.

    `…` stands for anything.
    """
    line = re.sub(r"\bdefault(?=/| namespace)", "…", line)
    words = [re.sub(r"\\?\d[\d,]*(?:\\?\.\d+)?", r"[\\d.,]+", re.escape(word)) for word in line.split()]
    return r"\s*" + r"\s+".join(words).replace("…", ".*") + r"\s*"


def missing_lines(shown: list[str], output: str) -> list[str]:
    """Those of the shown lines that do not follow one after the other in the output."""
    rest = iter(output.splitlines())
    return [line for line in shown if not any(re.fullmatch(_pattern(line), printed) for printed in rest)]


TYPED = {page.name: commands(page) for page in PAGES if page.name not in OTHER_PAGES and commands(page)}
SHOWN = {page.name: {line: output for line, output in typed_lines(page) if output} for page in PAGES}


@pytest.fixture(scope="module")
def shell(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator["Shell"]:
    """A shell whose kubeconfig is of the namespace `docs`, with what the pages take for granted there."""
    space = Space(cluster, "docs")
    others = [Space(cluster, name) for name in ("my-namespace", "team-a")]
    folder = tmp_path_factory.mktemp("docs")
    kubeconfig = folder / "kubeconfig"
    shutil.copy(cluster.kubeconfig, kubeconfig)
    environment = os.environ | cluster.environment() | {"KUBECONFIG": str(kubeconfig)}
    resources = cluster.api.get(paths.extendedresources())["items"]
    # Pages also name GPU 0 of n1, as `n1/0`.
    card = next(entry for entry in resources if _is_gpu(entry, "n1", 1))
    # What a page has the reader write lies beside the checkout, not in it.
    for part in ROOT.iterdir():
        (folder / part.name).symlink_to(part)
    shell = Shell(environment, {"folder": folder, "card": card["spec"]["uuid"], "resource": card["metadata"]["name"]})
    shell.type("kubectl config set-context --current --namespace=docs")
    for name in CLASSES:
        every = {"selector": {"matchExpressions": [{"key": "memory", "operator": "Gt", "values": ["1Mi"]}]}}
        resource_class = {"apiVersion": names.API_VERSION, "kind": "ResourceClass", "metadata": {"name": name}}
        # One that the extender has made for cards of another test would keep its selector beside ours.
        cluster.kubectl_object("delete", "resourceclass", name, "--ignore-not-found")
        cluster.kubectl_object("create", stdin=resource_class | {"spec": every})
    others[0].create(workload("my-pod", gpu_mem=100))
    for name, annotations in SLURP.items():
        space.create(workload(name, gpu_mem=100, annotations=annotations))
    space.running(*SLURP)
    # The extender makes it; `kubectl wait` does not wait for what is not there.
    space.wait(lambda: cluster.api.get(paths.podgroups(space.name, "slurp")), "their gang is there")
    yield shell
    for entry in (space, *others):
        cluster.kubectl_object("delete", "namespace", entry.name, "--wait=false")
    cluster.kubectl_object("delete", "resourceclass", *CLASSES, "high-mem", "--ignore-not-found")
    cluster.kubectl_object("delete", "clusterrolebinding", *BINDINGS, "--ignore-not-found")
    for entry in resources:
        cluster.api.patch(paths.extendedresources(entry["metadata"]["name"]), {"spec": dict.fromkeys(MARKS)})
    for entry in (space, *others):
        entry.wait(lambda entry=entry: not entry.pods(), "its pods are gone")


def _is_gpu(resource: Json, node: str, index: int) -> bool:
    spec = resource["spec"]
    return (spec["kind"], spec["node"], spec["index"]) == (classes.GPU_KIND, node, index)


class Shell:
    """Types the lines of a page; a plain `cardwise` needs no shell. `own`: what stands in the values of HERE."""

    def __init__(self, environment: dict[str, str], own: dict[str, object]) -> None:
        self._environment = environment
        self._folder = str(own["folder"])
        self._here = {there: here.format(**own) for there, here in HERE.items()}

    def type(self, line: str) -> subprocess.CompletedProcess[str]:
        for there, here in self._here.items():
            line = line.replace(there, here)
        program, *words = shlex.split(line, comments=True)
        if program == "cardwise" and not {"|", ">", "&&"} & set(words):
            with chdir(self._folder):
                return typed(self._environment, *words)
        return subprocess.run(
            ["bash", "-c", line],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )

    def tried(self, line: str) -> subprocess.CompletedProcess[str]:
        """As `type`, but doctor until it is content: an extender may be late with its Lease just now."""
        runs = []

        def so() -> bool:
            runs.append(self.type(line))
            return runs[-1].returncode == 0 or not line.startswith("cardwise doctor")

        wait_for(so)
        return runs[-1]


def test_the_quick_start_is_for_who_may_edit_in_one_namespace(cluster: Cluster, shell: "Shell", tmp_path: Path):
    """Nothing of it takes a right on the cluster; what is not to be seen is told with the role."""
    space = Space(cluster, "first-hour")
    environment = os.environ | cluster.environment() | {"KUBECONFIG": str(space.editor("ann", tmp_path))}
    ann = Shell(environment, {"folder": ROOT, "card": "", "resource": ""})
    try:
        for line in TYPED["quickstart.md"]:
            if line.startswith("kubectl delete"):
                break
            output = ann.type(line)
            assert output.returncode == 0, f"{line}\n{output.stdout}{output.stderr}"
        for command in ("inspect", "top --once", "nodes", "classes", "quota", "explain notebook"):
            output = ann.type(f"cardwise {command}")
            assert output.returncode == 0, f"{command}\n{output.stdout}{output.stderr}"
            shown = output.stdout + output.stderr
            assert "my-namespace" not in shown, "another team's pod"
            assert "(ClusterRole cardwise-view, docs/admin.md#looking)" in shown, command
            if command in ("inspect", "top --once", "nodes"):
                assert "first-hour/notebook" in output.stdout
            if command not in ("quota", "explain notebook"):
                assert "nvidia.tesla.k80 " in output.stdout, "a type"
        # A command that can show nothing says how an administrator gives ann the right: she has it then.
        refused = ann.type("cardwise gangs -A")
        assert refused.returncode != 0
        assert shell.type(refused.stderr.strip().partition(" grants it with: ")[2]).returncode == 0
        space.wait(lambda: ann.type("cardwise gangs -A").returncode == 0, "gangs may be seen")
        cluster.kubectl_object("delete", "clusterrolebinding", ANNS_ROLE)
        # What the page gives a group is what people.viewGPUs gives.
        assert VIEW in TYPED["admin.md"]
        assert shell.type(VIEW.replace("GROUP", f"system:serviceaccounts:{space.name}")).returncode == 0
        space.wait(lambda: "TOTAL-MIB" in ann.type("cardwise top --once").stdout, "cards may be seen")
        for command in ("inspect -d", "top --once", "nodes", "classes -o wide", "quota", "explain notebook"):
            output = ann.type(f"cardwise {command}")
            assert output.returncode == 0, f"{command}\n{output.stdout}{output.stderr}"
            assert "my-pod" not in output.stdout, "another team's pod"
            if command in ("inspect -d", "top --once"):
                assert "notebook" in output.stdout
    finally:
        cluster.kubectl_object("delete", "clusterrolebinding", "cardwise-view", ANNS_ROLE, "--ignore-not-found")
        space.delete("notebook", grace=1)
        space.wait(lambda: not space.pods(), "its pod is gone")
        cluster.kubectl_object("delete", "namespace", space.name, "--wait=false")


@pytest.mark.parametrize("page", sorted(TYPED))
def test_every_command_of_the_page_works(page, shell):
    for line in TYPED[page] + LEFT.get(page, []):
        output = shell.tried(line)
        printed = output.stdout + output.stderr
        assert output.returncode == 0, f"{page}: {line}\n{printed}"
        if (page, line) not in OF_OTHERS:
            assert missing_lines(SHOWN[page].get(line, []), printed) == [], f"{page}: {line}\n{printed}"

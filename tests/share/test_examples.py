"""examples/frameworks: pods that ask for a share and name only variables that the webhook writes into them."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from cardwise.core.api import mps, names, request
from cardwise.core.values import quantity
from cardwise.core.values.quantity import MiB
from tests.webhook.reviews import Known
from tests.webhook.sharing import IMAGE, admitted, agent, env
from webhook.cluster.cards import CardSizes
from webhook.pods import resources

ROOT = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted((ROOT / "frameworks").glob("*.yaml"))
DISTRIBUTED = sorted((ROOT / "distributed").glob("*.yaml"))


def test_there_are_examples():
    assert {path.stem for path in EXAMPLES} >= {"tensorflow", "pytorch", "jax", "vllm", "triton"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_asks_for_a_share_and_names_what_the_webhook_writes(path):
    """Kubernetes puts $(NAME) into an argument only where NAME stands in the pod's own env."""
    (pod,) = yaml.safe_load_all(path.read_text())
    request_ = request.parse(pod)
    assert request_ is not None
    (container,) = pod["spec"]["containers"]
    entries, _ = resources.merge_env_entries([], request_.containers[0], env_from=False)
    written = {entry["name"] for entry in entries}
    own_values = [entry["value"] for entry in container.get("env", [])]
    arguments = " ".join([*container.get("command", []), *container["args"], *own_values])
    named = set(re.findall(r"\b(?:CARDWISE|ALIYUN_COM|XLA)_[A-Z_]*[A-Z]\b", arguments))
    assert named
    assert named <= written
    assert set(re.findall(r"\$\((\w+)\)", arguments)) <= written


@pytest.mark.parametrize(
    "annotations", [{}, {names.ISOLATION: "mps", names.FRAMEWORKS: "on"}], ids=["alone", "with-all"]
)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_webhook_takes_it_as_it_stands(path, annotations):
    pod = yaml.safe_load(path.read_text())
    pod["metadata"] |= {"annotations": annotations, "namespace": "default"}
    known = Known(known_cards=CardSizes(largest=MiB(81559), max_cards=4), scopes=frozenset({"card"}))
    after, warnings = admitted(pod, known)
    assert warnings == ()
    (container,) = after["spec"]["containers"]
    mib = quantity.parse_mib(str(pod["spec"]["containers"][0]["resources"]["limits"][names.GPU_MEM]))
    assert env(container)[mps.LIMIT_ENV]["value"] == f"0={mib}M"
    assert agent(after)["image"] == IMAGE
    assert ("PYTHONPATH" in env(container)) is bool(annotations)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_its_program_can_be_read(path):
    (container,) = yaml.safe_load(path.read_text())["spec"]["containers"]
    if container.get("command", [""])[0].startswith("python"):
        ast.parse(container["args"][0])


def pods_of(path):
    """The pods of an example of several ranks, those of its workload's template included."""
    for manifest in yaml.safe_load_all(path.read_text()):
        if manifest["kind"] == "Pod":
            yield manifest
        elif "template" in manifest["spec"]:
            template = manifest["spec"]["template"]
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "rank", **template["metadata"]}} | {
                "spec": template["spec"]
            }


@pytest.mark.parametrize("path", DISTRIBUTED, ids=lambda path: path.stem)
def test_each_rank_is_told_its_share_and_keeps_to_it(path):
    (pod,) = pods_of(path)
    pod["metadata"]["namespace"] = "default"
    known = Known(known_cards=CardSizes(largest=MiB(81559), max_cards=4), scopes=frozenset({"node"}))
    after, warnings = admitted(pod, known)
    assert warnings == ()
    (container,) = after["spec"]["containers"]
    assert not request.parse(after).containers[0].whole
    (program,) = container["args"]
    ast.parse(program)
    (share,) = set(re.findall(r"CARDWISE_MEM_\w+", program))
    assert share in env(container)


def test_ranks_of_torchrun_have_a_gpu_each():
    (pod,) = pods_of(ROOT / "distributed" / "torchrun.yaml")
    (container,) = pod["spec"]["containers"]
    assert f"--nproc-per-node={request.parse(pod).containers[0].cards}" in container["command"]


def test_vllm_under_mps_asks_for_less_than_the_share(monkeypatch):
    (path,) = [path for path in EXAMPLES if path.stem == "vllm-mps"]
    (container,) = yaml.safe_load(path.read_text())["spec"]["containers"]
    started = []
    monkeypatch.setattr("os.execvp", lambda name, arguments: started.append(arguments))
    monkeypatch.setattr("sys.argv", ["-c", *container["args"][1:]])
    monkeypatch.setenv("CARDWISE_MEM_LIMIT_MIB", "40960")
    monkeypatch.setenv("ALIYUN_COM_GPU_MEM_DEV", "81559")
    exec(container["args"][0], {})
    assert started == [["vllm", "serve", "facebook/opt-125m", "--gpu-memory-utilization=0.4896"]]

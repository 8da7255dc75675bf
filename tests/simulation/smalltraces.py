"""A small made-up trace: nothing of the real one, whose licence is for research, is in this repository."""

from pathlib import Path
from random import Random

from cardwise.core.api.cards import Card
from cardwise.core.api.request import ContainerRequest, Load, PodRequest
from cardwise.core.values.quantity import MiB
from cardwise.simulation.workload import PodShape, SimulatedNode, SimulatedPod, SimulatedWorkload

NODES = """\
sn,cpu_milli,memory_mib,gpu,model
big-0,64000,262144,8,G2
big-1,64000,262144,8,G2
small-0,32000,131072,2,T4
small-1,32000,131072,2,T4
small-2,8000,131072,2,P100
plain-0,32000,131072,0,
"""
HEAD = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
KINDS = (
    (20, 1, 250, ""),
    (16, 1, 500, ""),
    (10, 1, 700, "T4|P100"),
    (8, 1, 1000, ""),
    (2, 4, 1000, "G2"),
    (6, 0, 0, ""),
)


def rows(kinds=KINDS):
    """CSV rows of pods; a kind is a number of pods, then the GPUs, thousandths of a GPU and models of each."""
    random = Random(7)
    i = 0
    for count, cards, milli, spec in kinds:
        for _ in range(count):
            cpu = random.choice((1000, 2000, 4000))
            yield f"pod-{i:03d},{cpu},4096,{cards},{milli},{spec},LS,Running,{i},{i + 100},{i}"
            i += 1


def write_trace(folder: Path, pods: str = "tiny", lines=None) -> Path:
    """Write the trace into the folder, and return the folder."""
    (folder / "openb_node_list_gpu_node.csv").write_text(NODES)
    (folder / f"openb_pod_list_{pods}.csv").write_text(HEAD + "\n".join(rows() if lines is None else lines) + "\n")
    return folder


def node(name: str, *cards: int, cpu: int = 64_000, model: str = "T4") -> SimulatedNode:
    gpus = tuple(Card(index=i, uuid=f"{name}-{i}", mem=MiB(mem), model=model) for i, mem in enumerate(cards))
    return SimulatedNode(name, gpus, Load(cpu, 1 << 40, 100))


def shape(mem: int = 0, cards: int = 1, cpu: int = 1000, resource_class: str = "") -> PodShape:
    """A pod's request of `mem` MiB in total, 0 for whole cards; with `cards=0` the pod requests no card."""
    container = ContainerRequest(key="0", name="main", cards=cards, mem=MiB(mem), resource_class=resource_class)
    return PodShape(PodRequest(containers=(container,)) if cards else None, Load(cpu, 1 << 20))


def workload(nodes, shapes) -> SimulatedWorkload:
    pods = tuple(SimulatedPod(f"pod-{i:03d}", pod_shape) for i, pod_shape in enumerate(shapes))
    return SimulatedWorkload("made-up", tuple(nodes), pods)

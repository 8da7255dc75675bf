"""Reads traces in the format of openb, Alibaba's cluster-trace-gpu-v2023: a list of nodes and lists of pods, as CSV.

The memory of a card is counted as 1000 units, since the trace has thousandths of a card and no MiB. A pod that names
card models requests a class of that name, and the engine finds its cards like those of a ResourceClass.
"""

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec

from cardwise.core.api.cards import Card
from cardwise.core.api.request import ContainerRequest, Load, PodRequest
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import MiB
from cardwise.simulation.workload import UNLIMITED_LOAD, PodShape, SimulatedNode, SimulatedPod, SimulatedWorkload

CARD_UNITS: Final = 1000  # units of memory that a card has
_NODES_PREFIX, _PODS_PREFIX, _SUFFIX = "openb_node_list_", "openb_pod_list_", ".csv"
_BYTES_PER_MIB = 1024**2
_REMEDY = (
    "get the folder csv/ of cluster-trace-gpu-v2023 of github.com/alibaba/clusterdata (for research and study), "
    "or write files of that format"
)
_T = TypeVar("_T", bound=msgspec.Struct)

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _NodeRow(msgspec.Struct):
    sn: str
    cpu_milli: _Count
    memory_mib: _Count
    gpu: Annotated[int, msgspec.Meta(ge=0, le=1024)]
    model: str


class _PodRow(msgspec.Struct):
    name: str
    cpu_milli: _Count
    memory_mib: _Count
    num_gpu: Annotated[int, msgspec.Meta(ge=0, le=1024)]
    gpu_milli: Annotated[int, msgspec.Meta(ge=0, le=CARD_UNITS)]
    gpu_spec: str = ""


def pod_list_names(folder: Path) -> list[str]:
    """The names of the lists of pods in the folder. Raises InvalidRequest if the folder has no list."""
    names = _list_names(folder, _PODS_PREFIX)
    if not names:
        raise InvalidRequest(str(folder), f"has no file {_PODS_PREFIX}NAME{_SUFFIX}", _REMEDY)
    return names


def read_trace(folder: Path, pods: str, nodes: str = "gpu_node") -> SimulatedWorkload:
    """Read a list of pods and a list of nodes.

    pods, nodes: the names of the lists, between the prefix of the file name and `.csv`.
    Raises InvalidRequest if a file is missing or has a wrong row.
    """
    pod_rows = _read_rows(_list_file(folder, _PODS_PREFIX, pods), _PodRow)
    node_rows = _read_rows(_list_file(folder, _NODES_PREFIX, nodes), _NodeRow)
    _check_nodes(f"{_NODES_PREFIX}{nodes}{_SUFFIX}", node_rows)
    shapes: dict[tuple[object, ...], PodShape] = {}
    simulated_pods = []
    for line, row in pod_rows:
        key = row.cpu_milli, row.memory_mib, row.num_gpu, row.gpu_milli, row.gpu_spec
        if key not in shapes:
            shapes[key] = _parse_shape(line, row)
        simulated_pods.append(SimulatedPod(row.name, shapes[key]))
    specs = {row.gpu_spec for _, row in pod_rows if row.gpu_spec}
    simulated_nodes = tuple(_parse_node(row, specs) for _, row in node_rows)
    return SimulatedWorkload(pods, simulated_nodes, tuple(simulated_pods), unit="1/1000 GPU")


def _check_nodes(file: str, rows: Iterable[tuple[str, _NodeRow]]) -> None:
    """Check the nodes. Raises InvalidRequest for a duplicate node, or if there is no card, since results are in percent
    of all cards.
    """
    first: dict[str, str] = {}
    cards = 0
    for line, row in rows:
        if row.sn in first:
            raise InvalidRequest(
                f"{line}, sn", f"{row.sn!r} is the name in {first[row.sn]} too", "give each node a unique name"
            )
        first[row.sn] = line
        cards += row.gpu
    if not cards:
        raise InvalidRequest(
            f"{file}, gpu", "no node has a GPU", "write the number of GPUs of each node, or name another list"
        )


def _parse_shape(line: str, row: _PodRow) -> PodShape:
    """The shape of the pod: the request of its row. Raises InvalidRequest for a request of 0 thousandths of a card."""
    load = Load(row.cpu_milli, row.memory_mib * _BYTES_PER_MIB)
    if not row.num_gpu:
        return PodShape(None, load)
    if not row.gpu_milli:
        raise InvalidRequest(f"{line}, gpu_milli", f"is 0, and num_gpu {row.num_gpu}", f"write 1 to {CARD_UNITS}")
    mem = MiB(0 if row.gpu_milli == CARD_UNITS else row.gpu_milli * row.num_gpu)
    container = ContainerRequest(key="0", name="main", cards=row.num_gpu, mem=mem, resource_class=row.gpu_spec)
    return PodShape(PodRequest(containers=(container,)), load)


def classes_of(model: str, specs: Iterable[str]) -> frozenset[str]:
    """The requested classes (`T4|P100`) that a card of the model belongs to."""
    return frozenset(spec for spec in specs if model in spec.split("|"))


def requested_classes(workload: SimulatedWorkload) -> set[str]:
    """The classes that the workload's pods request."""
    requests = (pod.shape.request for pod in workload.pods)
    return {c.resource_class for request in requests if request for c in request.containers if c.resource_class}


def _parse_node(row: _NodeRow, specs: set[str]) -> SimulatedNode:
    classes = classes_of(row.model, specs)
    cards = tuple(
        Card(index=i, uuid=f"{row.sn}-{i}", mem=MiB(CARD_UNITS), model=row.model, classes=classes)
        for i in range(row.gpu)
    )
    return SimulatedNode(row.sn, cards, Load(row.cpu_milli, row.memory_mib * _BYTES_PER_MIB, UNLIMITED_LOAD.pods))


def _list_names(folder: Path, prefix: str) -> list[str]:
    return sorted(path.name[len(prefix) : -len(_SUFFIX)] for path in folder.glob(f"{prefix}*{_SUFFIX}"))


def _list_file(folder: Path, prefix: str, name: str) -> Path:
    path = folder / f"{prefix}{name}{_SUFFIX}"
    if not path.is_file():
        names = ", ".join(_list_names(folder, prefix))
        remedy = f"name one of these: {names}" if names else _REMEDY
        raise InvalidRequest(str(folder), f"has no file {path.name}", remedy)
    return path


def _read_rows(path: Path, kind: type[_T]) -> list[tuple[str, _T]]:
    rows = list(_iterate_rows(path, kind))
    if not rows:
        raise InvalidRequest(path.name, "has no rows below its header", "write the rows, or name another list")
    return rows


def _iterate_rows(path: Path, kind: type[_T]) -> Iterator[tuple[str, _T]]:
    """The rows, each with its file and line for error messages. Raises InvalidRequest."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or ()
            missing = [
                f.encode_name for f in msgspec.structs.fields(kind) if f.required and f.encode_name not in columns
            ]
            if missing:
                raise InvalidRequest(
                    f"{path.name} line 1", f"has no column {missing[0]}", "write the header of the original trace"
                )
            for row in reader:
                line = f"{path.name} line {reader.line_num}"
                if reader.restkey in row:
                    problem = f"has {len(row[reader.restkey])} cells more than the header"
                    raise InvalidRequest(line, problem, "remove them, or put a cell with a comma in quotes")
                yield line, _convert_row(line, row, kind)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidRequest(path.name, f"cannot be read ({error})", "write it as CSV in UTF-8") from error


def _convert_row(line: str, row: dict[str, str], kind: type[_T]) -> _T:
    try:
        return msgspec.convert(row, type=kind, strict=False)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        field = path.rstrip("`")
        cell = row.get(field)
        problem = f"is missing ({reason})" if cell is None else f"{cell!r} is wrong ({reason})"
        place = f"{line}, {field}" if field else line
        raise InvalidRequest(place, problem, "write a whole number, or remove the line") from error

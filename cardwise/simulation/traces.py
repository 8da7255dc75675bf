"""Reads traces in the format of openb, Alibaba's cluster-trace-gpu-v2023: a list of nodes and lists of pods, as CSV.

A card is 1000 units, since the trace says thousandths of a card and not MiB. A pod that names card models asks for a
class of that name, so that the engine finds the cards as it finds those of a ResourceClass.
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
from cardwise.simulation.workload import UNLIMITED, PodShape, SimulatedNode, SimulatedPod, SimulatedWorkload

WHOLE: Final = 1000  # of a card
_NODES, _PODS, _END = "openb_node_list_", "openb_pod_list_", ".csv"
_MIB = 1024**2
_GET = (
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
    gpu_milli: Annotated[int, msgspec.Meta(ge=0, le=WHOLE)]
    gpu_spec: str = ""


def names(folder: Path) -> list[str]:
    """The names of the lists of pods in the folder. Raises InvalidRequest where there is none."""
    found = _names(folder, _PODS)
    if not found:
        raise InvalidRequest(str(folder), f"has no file {_PODS}NAME{_END}", _GET)
    return found


def read(folder: Path, pods: str, nodes: str = "gpu_node") -> SimulatedWorkload:
    """A list of pods on a list of nodes, each by the name between prefix and `.csv`. Raises InvalidRequest."""
    pod_rows = _all(_file(folder, _PODS, pods), _PodRow)
    node_rows = _all(_file(folder, _NODES, nodes), _NodeRow)
    _check_nodes(f"{_NODES}{nodes}{_END}", node_rows)
    shapes: dict[tuple[object, ...], PodShape] = {}
    found = []
    for where, row in pod_rows:
        key = row.cpu_milli, row.memory_mib, row.num_gpu, row.gpu_milli, row.gpu_spec
        if key not in shapes:
            shapes[key] = _shape(where, row)
        found.append(SimulatedPod(row.name, shapes[key]))
    specs = {row.gpu_spec for _, row in pod_rows if row.gpu_spec}
    return SimulatedWorkload(pods, tuple(_node(row, specs) for _, row in node_rows), tuple(found), unit="1/1000 card")


def _check_nodes(file: str, rows: Iterable[tuple[str, _NodeRow]]) -> None:
    """Raises InvalidRequest for one that comes twice, and where none has a card: all numbers are shares of cards."""
    first: dict[str, str] = {}
    cards = 0
    for where, row in rows:
        if row.sn in first:
            raise InvalidRequest(
                f"{where}, sn", f"{row.sn!r} is that of {first[row.sn]} as well", "give each node a name of its own"
            )
        first[row.sn] = where
        cards += row.gpu
    if not cards:
        raise InvalidRequest(f"{file}, gpu", "no node has a card", "write how many each has, or name another list")


def _shape(where: str, row: _PodRow) -> PodShape:
    """One for all pods that ask the same: who remembers by shape finds them."""
    load = Load(row.cpu_milli, row.memory_mib * _MIB)
    if not row.num_gpu:
        return PodShape(None, load)
    if not row.gpu_milli:
        raise InvalidRequest(f"{where}, gpu_milli", f"is 0 of each of {row.num_gpu} cards", f"write 1 to {WHOLE}")
    mem = MiB(0 if row.gpu_milli == WHOLE else row.gpu_milli * row.num_gpu)
    asked = ContainerRequest(key="0", name="main", cards=row.num_gpu, mem=mem, resource_class=row.gpu_spec)
    return PodShape(PodRequest(containers=(asked,)), load)


def classes_of(model: str, specs: Iterable[str]) -> frozenset[str]:
    """Which of the classes that pods ask for a card of the model is of."""
    return frozenset(spec for spec in specs if model in spec.split("|"))


def specs(workload: SimulatedWorkload) -> set[str]:
    """The classes that its pods ask for."""
    requests = (pod.shape.request for pod in workload.pods)
    return {c.resource_class for request in requests if request for c in request.containers if c.resource_class}


def _node(row: _NodeRow, specs: set[str]) -> SimulatedNode:
    of = classes_of(row.model, specs)
    cards = tuple(
        Card(index=i, uuid=f"{row.sn}-{i}", mem=MiB(WHOLE), model=row.model, classes=of) for i in range(row.gpu)
    )
    return SimulatedNode(row.sn, cards, Load(row.cpu_milli, row.memory_mib * _MIB, UNLIMITED.pods))


def _names(folder: Path, prefix: str) -> list[str]:
    return sorted(path.name[len(prefix) : -len(_END)] for path in folder.glob(f"{prefix}*{_END}"))


def _file(folder: Path, prefix: str, name: str) -> Path:
    path = folder / f"{prefix}{name}{_END}"
    if not path.is_file():
        there = ", ".join(_names(folder, prefix))
        remedy = f"name one that is there: {there}" if there else _GET
        raise InvalidRequest(str(folder), f"has no file {path.name}", remedy)
    return path


def _all(path: Path, kind: type[_T]) -> list[tuple[str, _T]]:
    found = list(_rows(path, kind))
    if not found:
        raise InvalidRequest(path.name, "has no line below its head", "write the lines, or name another list")
    return found


def _rows(path: Path, kind: type[_T]) -> Iterator[tuple[str, _T]]:
    """The rows, each with where it stands."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            heads = reader.fieldnames or ()
            missing = [f.encode_name for f in msgspec.structs.fields(kind) if f.required and f.encode_name not in heads]
            if missing:
                raise InvalidRequest(
                    f"{path.name} line 1", f"has no column {missing[0]}", "write the head of the trace's own file"
                )
            for row in reader:
                where = f"{path.name} line {reader.line_num}"
                if reader.restkey in row:
                    more = f"has {len(row[reader.restkey])} cells more than the head"
                    raise InvalidRequest(where, more, "leave them out, or write a cell with a comma in quotes")
                yield where, _converted(where, row, kind)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidRequest(path.name, f"cannot be read ({error})", "write it as CSV in UTF-8") from error


def _converted(where: str, row: dict[str, str], kind: type[_T]) -> _T:
    try:
        return msgspec.convert(row, type=kind, strict=False)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `$.")
        field = path.rstrip("`")
        value = row.get(field)
        problem = f"is missing ({said})" if value is None else f"{value!r} is wrong ({said})"
        at = f"{where}, {field}" if field else where
        raise InvalidRequest(at, problem, "write a whole number there, or leave the line out") from error

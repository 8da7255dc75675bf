"""The plots of `cardwise simulate`, as SVG: allocation, fragmentation and refused pods.

pygal is an optional dependency, imported only when a plot is requested.
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cardwise.core.values.invalid import InvalidRequest
from cardwise.simulation.refusals import SIZE_NAMES, RefusedPods

# Points: progress of the run, allocated part, fragmented part, all in percent.
Curve = Sequence[tuple[float, float, float]]

# The file contains no link to a script, which browsers would download.
_CHART_OPTIONS: Final[Mapping[str, Any]] = {"js": [], "legend_at_bottom": True}


def check_pygal() -> None:
    """Check that pygal is installed. Raises InvalidRequest."""
    _import_pygal()


def prepare_folder(folder: Path) -> None:
    """Create the folder if it does not exist. Raises InvalidRequest if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable_error(folder, error) from error


def draw_plots(
    x_title: str, curves: Mapping[str, Curve], refusals_by_policy: Mapping[str, Sequence[RefusedPods]]
) -> dict[str, bytes]:
    """Return the SVG of each plot, by the plot's name.

    x_title: the label of the x axis.
    curves: the curve of each policy.
    refusals_by_policy: the refused pods of each policy.
    """
    allocated = {policy: [(x, y) for x, y, _ in curve] for policy, curve in curves.items()}
    fragmented = {policy: [(x, y) for x, _, y in curve] for policy, curve in curves.items()}
    return {
        "allocated": _draw_lines("GPUs allocated, in percent", x_title, allocated),
        "fragmented": _draw_lines("Idle GPUs that the pods cannot use, in percent", x_title, fragmented),
        "refused": _draw_bars(refusals_by_policy),
    }


def write_plots(folder: Path, prefix: str, plots: Mapping[str, bytes]) -> list[Path]:
    """Write plots into a folder that `prepare_folder` has created. Returns the files. Raises InvalidRequest."""
    paths = []
    for name, svg in plots.items():
        paths.append(folder / f"{prefix}-{name}.svg")
        try:
            paths[-1].write_bytes(svg)
        except OSError as error:
            raise _unwritable_error(folder, error) from error
    return paths


def _unwritable_error(folder: Path, error: OSError) -> InvalidRequest:
    problem = f"cannot be written ({error.strerror})"
    return InvalidRequest(f"--plots {folder}", problem, "name a folder in which you may write")


def _draw_lines(title: str, x_title: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> bytes:
    chart = _import_pygal().XY(title=title, x_title=x_title, dots_size=1, **_CHART_OPTIONS)
    for name, line in lines.items():
        chart.add(name, line)
    return bytes(chart.render())


def _draw_bars(refusals_by_policy: Mapping[str, Sequence[RefusedPods]]) -> bytes:
    sizes = [
        size for size in SIZE_NAMES if any(row.size == size for rows in refusals_by_policy.values() for row in rows)
    ]
    chart = _import_pygal().Bar(
        title="Pods refused, in percent of the pods of the same size", x_title="GPUs requested", **_CHART_OPTIONS
    )
    chart.x_labels = sizes
    for policy, rows in refusals_by_policy.items():
        parts = {row.size: row.refused_pods_percent for row in rows}
        chart.add(policy, [parts.get(size) for size in sizes])
    return bytes(chart.render())


def _import_pygal() -> Any:
    try:
        import pygal  # noqa: PLC0415 - see above
    except ModuleNotFoundError as error:
        raise InvalidRequest("--plots", "needs pygal", "pip install 'cardwise[simulate]', or leave it out") from error
    # pygal installs an import hook for plugins, which Cardwise does not use. The hook has the old protocol, so Python
    # would warn at each later import.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, pygal.PluginImportFixer)]
    return pygal

"""The tables and the JSON for users without the right to read cards (`cardwise.cli.cluster.visible`)."""

from collections.abc import Iterable
from typing import Any

from cardwise.cli import console, rights
from cardwise.cli.cluster.visible import PodShare, VisibleCluster
from cardwise.cli.render import classtable, printing, tables
from cardwise.kube import errors


def print_visible(view: VisibleCluster, denied: errors.Forbidden, output: str) -> None:
    """Print the view of a user who may not read cards, and name the missing right.

    view: the parts of the cluster that the user may read.
    denied: the error that names the missing right.
    """
    console.print_text(
        f"note: showing the types, and the GPUs of your own pods only: {rights.describe_missing_right(denied)}",
        err=True,
    )
    if output in ("json", "yaml"):
        visible = {
            "nodes": None,
            "classes": None if view.types is None else [classtable.summary_as_json(listed) for listed in view.types],
            "pods": None if view.shares is None else [_share_as_json(listed) for listed in view.shares],
        }
        printing.print_object(visible, output)
        return
    parts = [classtable.format_summaries(view.types, console.terminal_columns())] if view.types else []
    parts += [tables.align_rows(_pod_rows(view.shares))] if view.shares else []
    console.print_lines("\n".join(parts))
    if view.shares is not None and not view.shares:
        console.print_text(f"no pod of namespace {view.namespace!r} holds a GPU", err=True)


def _pod_rows(shares: Iterable[PodShare]) -> list[list[str]]:
    rows = [["POD", "NODE", "GPU", "MIB"]]
    rows += [[f"{share.namespace}/{share.pod}", share.node, str(share.card), str(share.mem)] for share in shares]
    return rows


def _share_as_json(share: PodShare) -> dict[str, Any]:
    return {
        "namespace": share.namespace,
        "name": share.pod,
        "node": share.node,
        "gpu": share.card,
        "memoryMiB": share.mem,
    }

"""A GPU as a bar, with the pods that share it above; the widths are to scale.

`gpu: model | MiB`, then `pod: name | what it writes | MiB` for each pod.
"""

from collections.abc import Sequence

from docs.pictures import svg

_WIDTH, _MARGIN, _HEIGHT = 760, 20, 210
_POD_Y, _POD_HEIGHT, _BAR_Y, _BAR_HEIGHT, _GAP = 16, 50, 112, 56, 3
_COLORS = ("#ddf4ff", "#dafbe1", "#fbefff", "#ffefe7")
_FREE = "#f6f8fa"


def draw(lines: Sequence[str], title: str) -> str:
    """The picture. Raises `ValueError` if the pods have more memory than the GPU."""
    (model, memory), *pods = ([cell.strip() for cell in line.partition(": ")[2].split("|")] for line in lines)
    total, scale = int(memory), (_WIDTH - 2 * _MARGIN) / int(memory)
    parts: list[str] = []
    used = 0
    for (name, limit, mib), color in zip(pods, _COLORS, strict=False):
        x, width = _MARGIN + used * scale, int(mib) * scale
        middle = x + width / 2
        parts += [
            svg.box(x, _POD_Y, width - _GAP, _POD_HEIGHT, fill=color),
            svg.text(middle, _POD_Y + 21, name, size=13, bold=True),
            svg.text(middle, _POD_Y + 39, f"gpu-mem: {limit}"),
            svg.arrow((middle, _POD_Y + _POD_HEIGHT + 4), (middle, _BAR_Y - 3)),
            svg.box(x, _BAR_Y, width - _GAP, _BAR_HEIGHT, fill=color),
            svg.text(middle, _BAR_Y + 33, f"{mib} MiB", size=13, bold=True),
        ]
        used += int(mib)
    if used > total:
        raise ValueError(f"{title}: {used} MiB in pods, the GPU has {total}")
    x, width = _MARGIN + used * scale, (total - used) * scale
    parts += [
        svg.box(x, _BAR_Y, width, _BAR_HEIGHT, fill=_FREE),
        svg.text(x + width / 2, _BAR_Y + 33, f"{total - used} free"),
        svg.text(_WIDTH / 2, _HEIGHT - 16, f"one GPU: {model}, {total} MiB", size=13),
    ]
    return svg.frame(title, _WIDTH, _HEIGHT, parts)

"""GPUs beside each other, with the pods on them, on two sides: before and after. Heights are to scale.

`gpus: MiB` of each, `pod: name | MiB` for each pod, then twice `side: words | word for what no pod has`, with
`on: pod, pod` for each GPU of the side.
"""

from collections.abc import Sequence

from docs.pictures import svg

_GPU, _GAP, _HIGH, _MARGIN, _TOP, _BETWEEN = 116, 10, 288, 18, 46, 52


def draw(lines: Sequence[str], alternative: str) -> str:
    """The picture. Raises `ValueError` if pods have more memory than their GPU, `KeyError` for an unknown pod."""
    total = int(lines[0].removeprefix("gpus: ").removesuffix(" MiB"))
    mib_by_pod: dict[str, int] = {}
    parts: list[str] = []
    x, gpu, unused = float(_MARGIN), 0, ""
    for line in lines[1:]:
        kind, _, words = line.partition(":")
        if kind == "pod":
            name, mib = (cell.strip() for cell in words.split("|"))
            mib_by_pod[name] = int(mib)
        elif kind == "side":
            title, unused = (cell.strip() for cell in words.split("|"))
            if gpu:
                y = _TOP + _HIGH / 2
                parts.append(svg.arrow((x + 2, y), (x + _BETWEEN - _GAP - 4, y)))
                x += _BETWEEN - _GAP
                gpu = 0
            parts.append(svg.text(x, 28, title, size=15, bold=True, anchor="start"))
        else:
            pods = [name.strip() for name in words.split(",") if name.strip()]
            shares = [(name, mib_by_pod[name], f"pod{list(mib_by_pod).index(name)}") for name in pods]
            free = total - sum(mib for _, mib, _ in shares)
            if free < 0:
                raise ValueError(f"{', '.join(pods)} have {-free} MiB more than a GPU")
            parts += _draw_gpu(x, total, [*shares, (unused, free, "group")])
            parts.append(svg.text(x + _GPU / 2, _TOP + _HIGH + 22, f"GPU {gpu}: {total} MiB", size=12, fill="faint"))
            x, gpu = x + _GPU + _GAP, gpu + 1
    return svg.frame(alternative, x - _GAP + _MARGIN, _TOP + _HIGH + 38, parts)


def _draw_gpu(x: float, total: int, shares: Sequence[tuple[str, int, str]]) -> list[str]:
    """The shares of a GPU from the bottom up: words, MiB and color of each."""
    parts = [svg.box(x, _TOP, _GPU, _HIGH, fill="group", radius=2)]
    bottom = float(_TOP + _HIGH)
    for words, mib, fill in shares:
        height = _HIGH * mib / total
        middle = bottom - height / 2
        bottom -= height
        is_pod = fill != "group"
        if is_pod:
            parts.append(svg.box(x, bottom, _GPU, height, fill=fill, radius=2))
        ink = "ink" if is_pod else "faint"
        parts += [
            svg.text(x + _GPU / 2, middle - 3, words, bold=is_pod, fill=ink),
            svg.text(x + _GPU / 2, middle + 13, f"{mib} MiB", size=12, fill=ink),
        ]
    return parts

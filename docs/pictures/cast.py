"""A recorded terminal as a picture that plays, without a script: demo.cast, of `record`, in the format of asciinema.

The text moves up behind the window, and a curtain of the background's color uncovers it line by line.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from docs.pictures import svg, terminal

RECORDED = Path(__file__).with_name("demo.cast")
ALTERNATIVE = (
    "A recording of make demo: a cluster starts; pods share GPUs; a type, a quota, a gang; and why a pod waits."
)
_ROWS, _MARGIN, _LINE = 27, 14, 18
_SHORTEST, _LONGEST = 0.12, 1.2  # seconds between two lines
_READING = 1.6  # seconds before a scene, to read the one before
_END = 6.0  # seconds that the end is shown before the picture begins anew


def read_lines() -> list[tuple[float, str]]:
    """Each line of the recording, with its time in seconds."""
    events = [json.loads(line) for line in RECORDED.read_text().splitlines()[1:]]
    return [(float(time), text.rstrip("\r\n")) for time, _, text in events]


def draw() -> str:
    """The SVG."""
    recorded = read_lines()
    lines = [line for _, line in recorded]
    columns = max(map(len, lines))
    size = terminal.font_size(columns)
    width, height = 2 * _MARGIN + terminal.WIDTH, 2 * _MARGIN + _ROWS * _LINE
    times = _play(recorded)
    duration = times[-1] + _END
    uncovered = [(time, min(i, _ROWS) * _LINE) for i, time in enumerate(times, 1)]
    moved = [(time, -max(i - _ROWS, 0) * _LINE) for i, time in enumerate(times, 1)]
    style = (
        f"<style>{_keyframes('uncover', uncovered, duration)}{_keyframes('move', moved, duration)}"
        f".curtain{{animation:uncover {duration:.1f}s step-end infinite}}"
        f".screen{{animation:move {duration:.1f}s step-end infinite}}"
        "@media (prefers-reduced-motion: reduce){.curtain,.screen{animation:none}}</style>"
    )
    covered = _ROWS * _LINE
    below = f'transform="translate(0 {covered})"'
    parts = [
        style,
        f'<clipPath id="window"><rect x="0" y="{_MARGIN}" width="{width}" height="{_ROWS * _LINE}"/></clipPath>',
        terminal.background(width, height),
        # Where nothing plays, the end is shown.
        f'<g clip-path="url(#window)"><g class="screen" transform="translate(0 {moved[-1][1]})">',
        *(
            terminal.draw_line(_MARGIN, _MARGIN + _LINE * (i + 0.75), line, size)
            for i, line in enumerate(lines)
            if line
        ),
        "</g>",
        f'<rect class="group curtain" x="2" y="{_MARGIN}" width="{width - 4}" height="{covered}" {below}/></g>',
    ]
    return svg.frame(ALTERNATIVE, width, height, parts)


def _play(recorded: Sequence[tuple[float, str]]) -> list[float]:
    """When each line appears: no wait of the recording is long, and there is time to read."""
    times, last, now = [], 0.0, 0.5
    for time, line in recorded:
        now += min(max(time - last, _SHORTEST), _LONGEST) if line else _READING
        times.append(now)
        last = time
    return times


def _keyframes(name: str, offsets: Sequence[tuple[float, float]], duration: float) -> str:
    frames = ["0%{transform:translateY(0)}"]
    before = 0.0
    for time, offset in offsets:
        if offset != before:
            frames.append(f"{100 * time / duration:.2f}%{{transform:translateY({offset:.0f}px)}}")
            before = offset
    frames.append(f"100%{{transform:translateY({before:.0f}px)}}")
    return f"@keyframes {name}{{{''.join(frames)}}}"

"""Charts of a move, as Plotly figures. Colours are names of the stylesheet's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from migrations_app.models import Sample
from migrations_app.panels.rows import changed_in_words
from migrations_app.panels.seen import Seen

# How often a page fetches the figure while the move lives (seconds).
LIVE_SECONDS = 5
SHORT_SECONDS = 300


def changed(seen: Seen, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the figure "changed sessions while copying": per pass, and copied on its own scale.

    The first pass copies everything, so what it copies has not changed: the line begins
    with the second.
    """
    # Below some minutes the ticks would all read the same minute.
    seconds = (samples[-1].at - samples[0].at).total_seconds() if samples else 0.0
    ticks = "%H:%M" if seconds > SHORT_SECONDS else "%H:%M:%S"
    times = [f"{sample.at:%Y-%m-%d %H:%M:%S}" for sample in samples]
    # One point makes no line.
    mode = "lines" if len(samples) > 2 else "lines+markers"
    again = any(sample.passes > 1 for sample in samples)
    copied: dict[str, Any] = {
        "type": "scatter",
        "mode": mode,
        "name": "copied in all",
        "x": times,
        "y": [sample.copied for sample in samples],
        "line": {"color": "var(--ink-3)", "width": 1.5, "dash": "dash"},
        "hovertemplate": "%{y:,}",
    }
    data = [copied]
    layout: dict[str, Any] = {
        "xaxis": {"type": "date", "tickformat": ticks, "hoverformat": "%H:%M:%S", "nticks": 6},
        "yaxis": {"rangemode": "tozero", "tickformat": ",d", "nticks": 5},
    }
    if again:
        copied["yaxis"] = "y2"
        data = [
            {
                "type": "scatter",
                "mode": mode,
                "name": "changed",
                "x": times,
                "y": [sample.changed if sample.passes > 1 else None for sample in samples],
                "line": {"color": "var(--caution)", "width": 2, "shape": "hv"},
                "hovertemplate": "%{y:,}",
            },
            copied,
        ]
        layout["yaxis2"] = {
            "overlaying": "y",
            "side": "right",
            "rangemode": "tozero",
            "visible": False,
        }
    figure: dict[str, Any] = {
        # Shown in the plot's place while there is nothing to draw.
        "empty": "" if samples else "Nothing has been copied yet.",
        # The caption, and whether the legend names the second line: they change with the data.
        "says": changed_in_words(seen),
        "again": again,
        "data": data,
        "layout": layout,
        "narrow": {"xaxis": {"nticks": 4}},
    }
    if not seen.ended:
        figure["live"] = LIVE_SECONDS
    return figure

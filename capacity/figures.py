"""Charts of usage, as Plotly figures. Colours are names of the stylesheet's tokens."""

from __future__ import annotations

from typing import Any

from capacity.queries import CellUsage, UsagePage
from tenants.domain.words import count, counted, percent

# How often a page fetches a figure anew (seconds).
LIVE_SECONDS = 10


def minutes(page: UsagePage) -> dict[str, Any]:
    """Return the figure "tokens per minute": the last hour, refused turns on their own scale."""
    times = [f"{one.minute:%Y-%m-%d %H:%M}" for one in page.minutes]
    tokens = [one.counts.tokens for one in page.minutes]
    refused = [one.counts.refusals for one in page.minutes]
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": "tokens",
            "x": times,
            "y": tokens,
            "marker": {"color": "var(--series-1)"},
            "hovertemplate": "%{y:,} tokens",
        }
    ]
    layout: dict[str, Any] = {
        "xaxis": {"type": "date", "tickformat": "%H:%M", "hoverformat": "%H:%M UTC", "nticks": 6},
        "yaxis": {"rangemode": "tozero", "tickformat": ",d", "nticks": 5},
        "bargap": 0.2,
    }
    again = any(refused)
    if again:
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "refused turns",
                "x": times,
                # Only where there are any: a line along zero would cover the bars' feet.
                "y": [turns or None for turns in refused],
                "yaxis": "y2",
                "line": {"color": "var(--stop)", "width": 2},
                "marker": {"symbol": "x", "size": 7},
                "hovertemplate": "%{y:,} refused",
            }
        )
        layout["yaxis2"] = {
            "overlaying": "y",
            "side": "right",
            "rangemode": "tozero",
            "visible": False,
        }
    says = f"{counted(sum(tokens), 'token')} in the last hour"
    if again:
        says += f"; {counted(sum(refused), 'turn')} refused"
    return {
        "empty": "" if any(tokens) or again else "Nothing was used in the last hour.",
        "says": f"{says}.",
        "again": again,
        "data": data,
        "layout": layout,
        "narrow": {"xaxis": {"nticks": 4}},
        "live": LIVE_SECONDS,
    }


def days(page: UsagePage) -> dict[str, Any]:
    """Return the figure "tokens per day": the last 30 days beside today's budget."""
    dates = [f"{one.day:%Y-%m-%d}" for one in page.days]
    tokens = [one.counts.tokens for one in page.days]
    budget = page.scope.daily_token_budget
    over = [budget is not None and used >= budget for used in tokens]
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": "tokens",
            "x": dates,
            "y": tokens,
            "marker": {"color": ["var(--caution)" if full else "var(--series-1)" for full in over]},
            "hovertemplate": "%{y:,} tokens",
        }
    ]
    says = f"{counted(sum(tokens), 'token')} in {len(tokens)} days."
    if budget is not None:
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "today’s budget",
                "x": [dates[0], dates[-1]],
                "y": [budget, budget],
                "line": {"color": "var(--ink-3)", "width": 1.5, "dash": "dash"},
                "hovertemplate": "%{y:,} a day",
            }
        )
        says += f" {counted(sum(over), 'day')} at or above today’s budget of {count(budget)}."
    return {
        "empty": "" if any(tokens) else "Nothing was used in 30 days.",
        "says": says,
        "again": budget is not None,
        "data": data,
        "layout": {
            "xaxis": {"type": "date", "tickformat": "%d %b", "hoverformat": "%d %b", "nticks": 6},
            "yaxis": {"rangemode": "tozero", "tickformat": ",d", "nticks": 5},
            "bargap": 0.2,
        },
        "narrow": {"xaxis": {"nticks": 4}},
    }


def largest(used: CellUsage) -> dict[str, Any]:
    """Return the figure "who used most": each of the largest tenants' share of all tokens."""
    shares = [*used.largest, *([used.rest] if used.rest is not None else [])]
    names = [one.tenant for one in shares]
    top = sum(one.tokens for one in used.largest)
    many = len(used.largest)
    whose = "The largest tenant" if many == 1 else f"The {counted(many, 'largest tenant')}"
    return {
        "empty": "" if used.tokens else "Nothing was used.",
        "says": f"{whose} used {percent(top, used.tokens)} of {counted(used.tokens, 'token')}.",
        "again": False,
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                "name": "tokens",
                "x": [one.tokens for one in shares],
                "y": names,
                "marker": {
                    "color": ["var(--series-1)"] * len(used.largest)
                    + ["var(--rest-1)"] * (used.rest is not None)
                },
                "customdata": [percent(one.tokens, used.tokens) for one in shares],
                "hovertemplate": "%{x:,} tokens, %{customdata}",
            }
        ],
        "layout": {
            "xaxis": {"rangemode": "tozero", "tickformat": ",d", "nticks": 5},
            # The largest on top.
            "yaxis": {"autorange": "reversed", "type": "category"},
            "bargap": 0.2,
        },
        "narrow": {"xaxis": {"nticks": 3}},
    }

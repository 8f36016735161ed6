"""Numbers and times in templates: `tenants.domain.words`, as filters and one tag."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from urllib.parse import urlencode

from django import template
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from tenants.domain import words

register = template.Library()

for function in (
    words.count,
    words.percent,
    words.share,
    words.duration,
    words.elapsed,
    words.limit,
    words.latency,
    words.weight,
    words.rate,
    words.clock,
    words.ago,
    words.digest,
):
    register.filter(function.__name__, function)


@register.simple_tag
def when(at: datetime | None, now: datetime) -> str | SafeString:
    """Return a `<time>` element: the time of day, with the day where that is another."""
    if at is None:
        return words.NOT_MEASURED
    machine = f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return format_html('<time datetime="{}">{}</time>', machine, words.clock(at, now))


@register.filter
def coded(text: str) -> SafeString:
    """Return a sentence in which `a command` between grave accents is set as code.

    >>> coded("Run `manage.py restored` < now")
    'Run <code>manage.py restored</code> &lt; now'
    """
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return format_html("{}", text)
    return format_html_join(
        "",
        "{}",
        (
            (format_html("<code>{}</code>", part) if n % 2 else part,)
            for n, part in enumerate(parts)
        ),
    )


@register.simple_tag
def poll(name: str, *args: object, v: str = "", every: int | None, also: str = "") -> SafeString:
    """Return the attributes that make an element poll its fragment, or nothing once it has ended.

    `moved` is sent by the answer to an act, so that every panel looks at once.
    """
    if not every:
        return SafeString("")
    query = {"v": v} if v else {}
    url = reverse(name, args=args)
    if query or also:
        url = f"{url}?{'&'.join(part for part in (urlencode(query), also) if part)}"
    return format_html(
        'hx-get="{}" hx-trigger="every {}s, moved from:body" hx-swap="outerHTML"', url, every
    )


@register.simple_tag
def bar(share: float | None) -> str:
    """Return a bar's width as SVG wants it, whatever the language of the page."""
    return f"{share or 0:.2f}"


# Lamps of one row stand 12 units apart; past so many only the words count them.
LAMP_GAP, LAMPS_MOST = 12, 24


@register.simple_tag
def lamps_width(lamps: Sequence[bool]) -> int:
    """Return the width of a row of lamps, in SVG units."""
    return LAMP_GAP * min(len(lamps), LAMPS_MOST) - 2


@register.simple_tag
def lamp_x(index: int, offset: float = 0) -> str:
    """Return where a lamp's middle, or something beside it, stands."""
    return f"{LAMP_GAP * index + 5 + offset:g}"

"""Numbers and times in templates: `tenants.domain.words`, as filters and one tag."""

from __future__ import annotations

from datetime import UTC, datetime

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

from tenants.domain import words

register = template.Library()

for function in (
    words.count,
    words.percent,
    words.duration,
    words.elapsed,
    words.limit,
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

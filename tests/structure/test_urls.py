"""Every URL says who may see it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.urls import URLPattern, URLResolver, get_resolver

from tenants.domain.roles import Door, Role

# Django's own admin keeps its own door; the API authenticates each call (tests/web/api).
GUARDED_ELSEWHERE = ("admin/", "api/v1/")


def _patterns(
    resolver: URLResolver | None = None, prefix: str = ""
) -> Iterator[tuple[str, URLPattern]]:
    for pattern in (resolver or get_resolver()).url_patterns:
        where = prefix + str(pattern.pattern)
        if isinstance(pattern, URLResolver):
            yield from _patterns(pattern, where)
        else:
            yield where, pattern


PAGES = [
    pytest.param(pattern, id=where or "/")
    for where, pattern in _patterns()
    if not where.startswith(GUARDED_ELSEWHERE)
]


@pytest.mark.parametrize("pattern", PAGES)
def test_a_page_states_who_may_see_it(pattern: URLPattern) -> None:
    view = pattern.callback
    open_to_all = not getattr(view, "login_required", True)
    assert open_to_all or isinstance(getattr(view, "access", None), (Role, Door))


def test_url_names_are_unique() -> None:
    # Those two have namespaces of their own: "api:abort" is no page's "abort".
    names = [p.name for where, p in _patterns() if not where.startswith(GUARDED_ELSEWHERE)]
    named = [name for name in names if name]
    assert sorted(named) == sorted(set(named))

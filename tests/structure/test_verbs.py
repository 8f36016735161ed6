"""What people may ask of the product on a page, programs may ask as well, under one name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
from django.test import RequestFactory
from django.urls import URLPattern, URLResolver, get_resolver

from capacity.api_isolation import router as isolation
from capacity.api_limits import router as limits
from migrations_app import services
from migrations_app.api import restored_router, stores_router
from migrations_app.api import router as moves
from migrations_app.api_channels import router as channels
from migrations_app.api_rehearsals import router as rehearsals
from migrations_app.api_safety import router as safety
from migrations_app.domain.verbs import WORDS
from tenants.api import ops_router
from tenants.domain.roles import Role

# Functions of the operators' API that may change something, by name.
OPERATIONS = {
    operation.view_func.__name__
    for router in (
        moves,
        restored_router,
        stores_router,
        channels,
        rehearsals,
        safety,
        isolation,
        limits,
        ops_router,
    )
    for path in router.path_operations.values()
    for operation in path.operations
    if "POST" in operation.methods
}
# Pages that are more than their verb: the API has it under the verb's own name.
ELSEWHERE = {
    "new_move": "start",
    "dead": "ask_dead",
    "rehearse": "rehearse_copy",
    "new_channel": "register_channel",
    "check_channel": "check_off_channel",
    "store_services": "set_store_services",
}


def _acts(resolver: URLResolver) -> Iterator[URLPattern]:
    """Yield what takes a POST of somebody with a role: not the sign-in, not Django's admin."""
    for pattern in resolver.url_patterns:
        if isinstance(pattern, URLResolver):
            yield from _acts(pattern)
        elif isinstance(getattr(pattern.callback, "access", None), Role):
            answer = pattern.callback(RequestFactory().options("/"))
            if "POST" in answer.headers["Allow"]:
                yield pattern


ACTS = sorted(pattern.name for pattern in _acts(get_resolver()))
SERVICES = sorted(
    name
    for name, function in inspect.getmembers(services, inspect.isfunction)
    if function.__module__ == services.__name__
    and not name.startswith("_")
    and {"move", "by"} <= set(inspect.signature(function).parameters)
)


@pytest.mark.parametrize("name", ACTS)
def test_a_verb_of_a_page_is_one_of_the_api(name: str) -> None:
    assert ELSEWHERE.get(name, name) in OPERATIONS


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_does_to_a_move_has_a_page(name: str) -> None:
    assert name in ACTS


def test_each_verb_has_words_and_no_word_is_of_a_verb_that_is_gone() -> None:
    assert set(WORDS) == set(SERVICES)

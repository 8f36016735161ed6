"""What people may ask of a move, programs may ask as well, under one name."""

from __future__ import annotations

import inspect

import pytest
from django.test import RequestFactory
from django.urls import URLPattern

from migrations_app import services, urls
from migrations_app.api import router
from migrations_app.domain.verbs import WORDS

# Functions of the API that change something or may, by name.
OPERATIONS = {
    operation.view_func.__name__
    for path in router.path_operations.values()
    for operation in path.operations
    if "POST" in operation.methods
}
# A page and what it does are one view; the API starts a move by POST to the list.
ELSEWHERE = {"new_move": "start"}


def takes_post(pattern: URLPattern) -> bool:
    answer = pattern.callback(RequestFactory().options("/"))
    return "POST" in answer.headers["Allow"]


ACTS = sorted(pattern.name for pattern in urls.urlpatterns if takes_post(pattern))
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
def test_what_a_service_does_to_a_move_has_a_page_and_words(name: str) -> None:
    assert name in ACTS
    assert name in WORDS


def test_no_word_is_of_a_verb_that_is_gone() -> None:
    assert set(WORDS) == set(SERVICES)

"""Signing in and out: by name and password, not by guessing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.core.cache import cache
from django.test import Client
from django.urls import reverse

from platform_admin.views import SIGN_IN_TRIES
from tenants.domain.roles import Role
from tests import scene

SIGN_IN = "/sign-in/"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    cache.clear()
    yield
    cache.clear()


@pytest.fixture
def olga(db: None) -> None:
    scene.person("olga", Role.OPERATOR)


def sign_in(client: Client, password: str = scene.PASSWORD, **more: str) -> object:
    return client.post(SIGN_IN, {"username": "olga", "password": password, **more})


@pytest.mark.usefixtures("olga")
def test_a_name_and_its_password_lead_to_the_overview(client: Client) -> None:
    assert sign_in(client)["Location"] == reverse("overview")
    assert client.get("/").status_code == 200


@pytest.mark.usefixtures("olga")
def test_the_page_that_was_asked_for_comes_next(client: Client) -> None:
    assert sign_in(client, next="/tenants/")["Location"] == "/tenants/"


@pytest.mark.usefixtures("olga")
def test_another_site_never_comes_next(client: Client) -> None:
    assert sign_in(client, next="https://elsewhere.example/")["Location"] == reverse("overview")


@pytest.mark.usefixtures("olga")
def test_a_wrong_password_says_so_and_not_which_was_wrong(client: Client) -> None:
    html = sign_in(client, "guess").content.decode()
    assert "This name and password do not match." in html
    other = client.post(SIGN_IN, {"username": "nobody", "password": "guess"}).content.decode()
    assert "This name and password do not match." in other


@pytest.mark.usefixtures("olga")
def test_guessing_is_stopped_even_for_the_right_password(client: Client) -> None:
    for _ in range(SIGN_IN_TRIES):
        sign_in(client, "guess")
    html = sign_in(client).content.decode()
    assert "Too many wrong passwords." in html
    assert client.get("/").status_code == 302


@pytest.mark.usefixtures("olga")
def test_a_right_password_forgets_wrong_ones(client: Client) -> None:
    for _ in range(SIGN_IN_TRIES - 1):
        sign_in(client, "guess")
    assert sign_in(client).status_code == 302


@pytest.mark.usefixtures("olga")
def test_signing_out_ends_the_session(client: Client) -> None:
    sign_in(client)
    assert client.get("/sign-out/").status_code == 405
    assert client.post("/sign-out/").status_code == 302
    assert client.get("/").status_code == 302


def test_the_sign_in_page_shows_nothing_of_the_product(client: Client, db: None) -> None:
    html = client.get(SIGN_IN).content.decode()
    assert 'id="signals"' not in html
    assert 'aria-label="Main"' not in html

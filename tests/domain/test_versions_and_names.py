"""Versions on the wire, and what may be called what."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants.domain import names, reports, versions
from tenants.domain.versions import Version, number_of, parse


@pytest.mark.parametrize("module", [names, reports, versions])
def test_the_examples_in_the_docstrings_hold(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


@given(st.integers(0, 10**18 - 1))
def test_a_version_comes_back_from_its_spelling(number: int) -> None:
    version = Version("9f3c01d2ab45", number)
    assert parse(str(version)) == version


@given(st.text(max_size=40))
def test_any_other_text_is_no_version_and_no_crash(text: str) -> None:
    version = parse(text)
    assert version is None or str(version) == text


@pytest.mark.parametrize(
    "text", ["ab.+7", "ab. 7", "ab.7\n", "AB.7", "ab.٧", "ab.1_0", ".7", "ab."]
)
def test_a_near_miss_is_no_version(text: str) -> None:
    assert parse(text) is None


def test_a_number_of_another_epoch_is_none_of_ours() -> None:
    assert number_of("ab12.7", "ab13") is None


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://mover:hunter2@db/acme",
        "env:postgresql://mover:hunter2@db/acme",
        "file:postgresql://mover:hunter2@db/acme",
        "file:/run/hunter2@db",
        "file://hunter2/acme",
        "env:",
        "env:A-B",
        "file:relative",
        "env:A\n",
        "hunter2",
    ],
)
def test_an_address_is_refused_and_not_repeated(address: str) -> None:
    with pytest.raises(names.NotAReference) as refused:
        names.check_address_from(address)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://agents",
        "https://",
        "https://user:pw@agents",
        "https://:pw@agents",
        "https://[::1",
        "agents",
        "https://agents/\x00",
        "https://agents:0",
        "https://agents:99999",
        "https://a" + "a" * 200,
    ],
)
def test_a_url_that_gateways_could_not_use_is_refused(url: str) -> None:
    with pytest.raises(names.BadUrl):
        names.check_url(url)


@pytest.mark.parametrize("url", ["", "http://agents:8000", "https://[::1]:8443/turns"])
def test_a_url_inside_a_network_is_taken(url: str) -> None:
    names.check_url(url)


@pytest.mark.parametrize(
    "app_name",
    [
        "",
        ".acme",
        " support",
        "support ",
        "a" * 129,
        "sup\0port",
        "sup\nport",
        "\ud800",
        "a\u202eb",
    ],
)
def test_an_app_name_that_no_store_could_hold_is_refused(app_name: str) -> None:
    with pytest.raises(names.BadAppName):
        names.check_app_name(app_name)


def test_an_app_name_may_have_the_whole_column() -> None:
    names.check_app_name("a" * 128)


@pytest.mark.parametrize("slug", ["", "Acme", "-acme", "a/b", "a" * 61, "acme\n", "äcme", "a\0"])
def test_a_slug_that_would_not_survive_in_a_url_is_refused(slug: str) -> None:
    with pytest.raises(names.BadSlug):
        names.check_slug(slug, what="tenant")

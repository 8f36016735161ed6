"""What may be called what, and the refusals for what may not."""

from __future__ import annotations

import re
from enum import StrEnum
from urllib.parse import urlsplit

from durable.errors import Refused

APP_NAME_MAX = 128
_SLUG = re.compile(r"[a-z0-9][a-z0-9_-]*")
_ENVIRONMENT = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")
# No colon and no @: a URL with a password in it never looks like this.
_FILE = re.compile(r"file:/[A-Za-z0-9._-][A-Za-z0-9._/-]*")


class Tier(StrEnum):
    """How much of the stack a tenant has for itself."""

    POOLED = "pooled"  # Shares its cell and its store.
    BRIDGE = "bridge"  # Shares its cell, has a store of its own.
    SILO = "silo"  # Has a cell and a store of its own.


class StoreKind(StrEnum):
    """Which port of migrations_app opens a store."""

    ADK_SQL = "adk-sql"  # google-adk's DatabaseSessionService, on PostgreSQL or SQLite.
    ADK_SQLITE = "adk-sqlite"  # google-adk's SqliteSessionService: another layout, in a file.
    ADK_SERVICE = "adk-service"  # Any BaseSessionService, by URI or dotted path: by replay.


class BadSlug(Refused):
    """A slug holds what would not survive in a URL, a log line or a metric."""


class BadName(Refused):
    """A name for people is empty, too long or holds a control character."""


class BadAppName(Refused):
    """No ADK store could hold this app name, or nobody could tell it from another."""


class NotAReference(Refused):
    """A store's address was not given by reference."""


class BadUrl(Refused):
    """Gateways could not forward to this address, or it would show a password to all of them."""


class UnknownStoreKind(Refused):
    """No port opens this kind of store."""


class UnknownTier(Refused):
    """There is no such tier."""


def check_slug(slug: str, *, what: str, longest: int = 60) -> None:
    """Raise BadSlug unless `slug` is 1 to `longest` of a-z, 0-9, "-" and "_".

    >>> check_slug("eu-pooled-2", what="cell")
    """
    if len(slug) > longest or not _SLUG.fullmatch(slug):
        raise BadSlug(
            f"{slug[:80]!r} can't be the slug of a {what}: it goes into addresses and logs. Use 1 "
            f"to {longest} lower-case letters, digits, hyphens and underscores, beginning with "
            "a letter or a digit."
        )


def check_name(name: str, *, what: str, longest: int = 100) -> None:
    """Raise BadName unless `name` is a line of text that a page can show."""
    if not name.strip() or len(name) > longest or not name.isprintable():
        raise BadName(
            f"The {what}'s name must be one line of 1 to {longest} visible characters. "
            "Shorten it, or remove what is invisible."
        )


def check_app_name(app_name: str) -> None:
    """Raise BadAppName unless `app_name` can be the identity of sessions in every ADK store.

    >>> check_app_name("support.acme")
    """
    if "\0" in app_name:
        raise BadAppName("The app name holds a NUL, which PostgreSQL can't store. Remove it.")
    if len(app_name) > APP_NAME_MAX:
        raise BadAppName(
            f"The app name has {len(app_name)} characters; ADK's column holds {APP_NAME_MAX}. "
            "Give the name that the agent's runner uses, which can't be longer either."
        )
    if not agent_of(app_name) or app_name != app_name.strip() or not app_name.isprintable():
        raise BadAppName(
            "The app name must not be empty, begin with a dot, begin or end with a space, or hold "
            "invisible characters. Give the name that the agent's runner uses, such as \"support."
            'acme".'
        )


def agent_of(app_name: str) -> str:
    """Return the agent: the part of an app name before the first dot.

    >>> agent_of("support.acme"), agent_of("support")
    ('support', 'support')
    """
    return app_name.split(".", 1)[0]


def check_address_from(address_from: str) -> None:
    """Raise NotAReference unless a store's address is given by reference.

    The refused text isn't repeated: somebody may have pasted an address with its password.

    >>> check_address_from("env:ACME_STORE_URL"); check_address_from("file:/run/secrets/acme")
    """
    known = _ENVIRONMENT.fullmatch(address_from) or _FILE.fullmatch(address_from)
    if not known or len(address_from) > 200:
        raise NotAReference(
            "A store's address must be a reference, since it holds a password: "
            '"env:ACME_STORE_URL" names an environment variable of the workers, '
            '"file:/run/secrets/acme" a file that they can read. What was given is neither, and '
            "is not repeated or kept. If it was an address with a password, change that password."
        )


def check_url(url: str) -> None:
    """Raise BadUrl unless `url` is empty or where gateways can forward turns to.

    >>> check_url(""); check_url("https://agents.eu.example:8443/")
    """
    if not url:
        return
    try:
        parts = urlsplit(url)
        fits = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        fits = False
    # Not `parts.username`: that is None for "http://:secret@host".
    if not fits or "@" in url or not url.isascii() or not url.isprintable() or len(url) > 200:
        raise BadUrl(
            "A cell's URL must be an http or https address of at most 200 characters, without a "
            'user name or a password, such as "https://agents.eu.example". Leave it empty where '
            "runtimes and clients share a process."
        )


def check_kind(kind: str) -> None:
    """Raise UnknownStoreKind unless a port opens this kind of store."""
    if kind not in list(StoreKind):
        raise UnknownStoreKind(
            f"No store of kind {kind[:40]!r} can be opened. Choose one of: {', '.join(StoreKind)}."
        )


def check_tier(tier: str) -> None:
    """Raise UnknownTier unless `tier` is one of Tier."""
    if tier not in list(Tier):
        raise UnknownTier(f"There is no tier {tier[:40]!r}. Choose one of: {', '.join(Tier)}.")

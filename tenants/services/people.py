"""Who may ask: people's sign-ins and roles, and bearer tokens."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from datetime import datetime, timedelta

from django.contrib.auth.models import Group, User
from django.db import transaction

from durable.errors import Refused
from tenants import queries
from tenants.domain import names
from tenants.domain.roles import Role, TokenRole
from tenants.models import Cell, Membership, Tenant, Token
from tenants.services.auditing import WHO_MAX, audit
from tenants.services.registry import SlugTaken
from tenants.services.rows import insert, taken

TOKEN_USE_NOTED = timedelta(minutes=1)


class BadToken(Refused):
    """A token would be good for nothing, or for too much."""


class AlreadyRevoked(Refused):
    """The token was revoked before."""


class AlreadyAMember(Refused):
    """The person is of a tenant already."""


class NotAMember(Refused):
    """The person is of no tenant, or of another."""


class HasARole(Refused):
    """The person has a role, and a tenant's people have none."""


class IsAMember(Refused):
    """The person is a tenant's, and a tenant's people get no role."""


@transaction.atomic
def add_sign_in(name: str, *, role: Role, by: str, now: datetime) -> tuple[User, str]:
    """Let a person sign in with a role; return them and their password, which is shown this once.

    Raises BadName, SlugTaken.
    """
    user, password = _new_user(name, by=by, now=now)
    return grant_role(user, role, by=by, now=now), password


@transaction.atomic
def add_member_sign_in(
    name: str, *, tenant: Tenant, by: str, now: datetime
) -> tuple[Membership, str]:
    """Let a person of a tenant sign in; return the membership and a password, shown this once.

    Raises BadName, SlugTaken.
    """
    user, password = _new_user(name, by=by, now=now)
    return add_member(user, tenant=tenant, by=by, now=now), password


def _new_user(name: str, *, by: str, now: datetime) -> tuple[User, str]:
    names.check_name(name, what="sign-in", longest=WHO_MAX)
    password = secrets.token_urlsafe(12)
    user = User(username=User.normalize_username(name))
    user.set_password(password)
    insert(user, SlugTaken(taken("sign-in", name)))
    audit(who=by, verb="user.add", subject=_of_user(user), now=now)
    return user, password


@transaction.atomic
def add_member(user: User, *, tenant: Tenant, by: str, now: datetime) -> Membership:
    """Let a person see a tenant's usage, and nothing else; return the membership.

    Raises HasARole, AlreadyAMember.
    """
    # The same row is locked where a role is granted: nobody gets both at once.
    locked = User.objects.select_for_update().get(pk=user.pk)
    held = Membership.objects.select_related("tenant").filter(user=locked).first()
    if held is not None:
        raise AlreadyAMember(
            f"{locked} is of {held.tenant} already, and a person is of one tenant. Remove them "
            "there first, or make another sign-in."
        )
    if role := queries.role_of(locked):
        raise HasARole(
            f"{locked} is {role}, and whoever has a role sees every tenant's usage. Take the role "
            "away first, or make another sign-in."
        )
    made = Membership.objects.create(user=locked, tenant=tenant, at=now, by=by)
    _audit_member(made, "member.add", by=by, before=None, after=tenant.slug, now=now)
    return made


@transaction.atomic
def remove_member(user: User, *, tenant: Tenant, by: str, now: datetime) -> None:
    """Let a person see the tenant's usage no longer, from their next page on.

    Raises NotAMember.
    """
    locked = User.objects.select_for_update().get(pk=user.pk)
    held = Membership.objects.filter(user=locked, tenant=tenant).first()
    if held is None:
        raise NotAMember(f"{locked} is not of {tenant}, so there is nothing to take away.")
    _audit_member(held, "member.remove", by=by, before=tenant.slug, after=None, now=now)
    held.delete()


def _audit_member(
    row: Membership, verb: str, *, by: str, before: str | None, after: str | None, now: datetime
) -> None:
    audit(
        who=by,
        verb=verb,
        subject=_of_user(row.user),
        before={"tenant": before},
        after={"tenant": after},
        now=now,
    )


@transaction.atomic
def grant_role(user: User, role: Role | None, *, by: str, now: datetime) -> User:
    """Make this the one role of a person, None: no role; return them afresh.

    A superuser is one no longer: only the group counts from here on, so that a role that is
    lowered or taken away really is. An admin may look at rows in Django's admin. Raises IsAMember.
    """
    locked = User.objects.select_for_update().get(pk=user.pk)
    held = Membership.objects.select_related("tenant").filter(user=locked).first()
    if role is not None and held is not None:
        raise IsAMember(
            f"{locked} is of {held.tenant} and would see every tenant as {role}. Remove them from "
            "it first, or make another sign-in."
        )
    before = queries.role_of(locked)
    locked.groups.remove(*Group.objects.filter(name__in=[one.value for one in Role]))
    if role is not None:
        locked.groups.add(Group.objects.get(name=role.value))
    locked.is_superuser = False
    locked.is_staff = role is Role.ADMIN
    locked.save(update_fields=["is_superuser", "is_staff"])
    audit(
        who=by,
        verb="user.role",
        subject=_of_user(locked),
        before={"role": before},
        after={"role": role},
        now=now,
    )
    return locked


def _of_user(user: User) -> str:
    return f"user {user.get_username()}"[:WHO_MAX]


@transaction.atomic
def make_token(
    name: str,
    *,
    role: TokenRole,
    cells: Collection[Cell] = (),
    tenant: Tenant | None = None,
    user: User | None = None,
    expires_at: datetime,
    by: str,
    now: datetime,
) -> tuple[Token, str]:
    """Make a bearer token; return its row and the secret, which is not kept and never shown again.

    Raises BadName, BadToken.
    """
    names.check_name(name, what="token")
    kind = TokenRole(role)
    if bool(cells) != (kind is TokenRole.RUNTIME):
        raise BadToken(
            "A runtime's token names the cells that it may serve, and no other token names any. "
            "Correct the cells or the role."
        )
    if (tenant is not None) != (kind is TokenRole.TENANT):
        raise BadToken(
            "A tenant's token names the tenant whose usage it reads, and no other token names "
            "one. Correct the tenant or the role."
        )
    if (user is not None) != (kind is TokenRole.OPERATOR):
        raise BadToken(
            "An operator's token names the user that it acts for, and no other token names one. "
            "Correct the user or the role."
        )
    if expires_at <= now:
        raise BadToken("The token would have expired before its first use. Choose a later time.")
    # The prefix is drawn apart, so that showing it gives away none of the 256 bits.
    prefix = f"sy_{secrets.token_hex(3)}"
    secret = f"{prefix}_{secrets.token_urlsafe(32)}"
    token = Token.objects.create(
        name=name,
        prefix=prefix,
        digest=queries.digest(secret),
        role=kind,
        tenant=tenant,
        user=user,
        created_at=now,
        created_by=by,
        expires_at=expires_at,
    )
    token.cells.set(cells)
    after = {
        "prefix": prefix,
        "role": str(kind),
        "cells": sorted(cell.slug for cell in cells),
        "tenant": tenant.slug if tenant is not None else None,
        "user": user.get_username() if user is not None else None,
        "expires_at": expires_at,
    }
    audit(who=by, verb="token.make", subject=f"token {name}", after=after, now=now)
    return token, secret


@transaction.atomic
def revoke_token(token: Token, *, by: str, reason: str = "", now: datetime) -> Token:
    """Revoke a token; it opens nothing from a second later. Raises AlreadyRevoked."""
    row = Token.objects.select_for_update(of=("self",)).get(pk=token.pk)
    if row.revoked_at is not None:
        raise AlreadyRevoked(
            f"{row} was revoked at {row.revoked_at:%Y-%m-%d %H:%M:%S} UTC already."
        )
    row.revoked_at = now
    row.save(update_fields=["revoked_at"])
    audit(
        who=by,
        verb="token.revoke",
        subject=f"token {row.name}",
        reason=reason,
        before={"prefix": row.prefix, "revoked_at": None},
        after={"prefix": row.prefix, "revoked_at": now},
        now=now,
    )
    return row


def note_token_use(token: Token, *, now: datetime) -> None:
    """Note that a token was used; written at most once a minute, so that polls stay reads."""
    if token.last_used_at is None or now - token.last_used_at >= TOKEN_USE_NOTED:
        Token.objects.filter(pk=token.pk).update(last_used_at=now)
        token.last_used_at = now

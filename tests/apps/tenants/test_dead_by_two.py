"""An instance is declared dead by two people, or by a move that closes the store behind it."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from durable.errors import Refused
from tenants import services
from tenants.domain.fence import DEAD_ASK_LASTS, GoneWhy
from tenants.models import AuditEntry, RuntimeInstance
from tests import make

SILENT = timedelta(seconds=17)
pytestmark = pytest.mark.django_db


@pytest.fixture
def joined(process: Any, cast: make.Cast, now: datetime) -> Any:
    one = process(cast.cell)
    one.join(now=now)
    return one


@pytest.fixture
def later(now: datetime) -> datetime:
    """When the instance has been silent for three polls."""
    return now + SILENT


def ask(row: RuntimeInstance, now: datetime, person: str = "ada") -> RuntimeInstance:
    return services.ask_dead(
        row, person=person, by=f"{person} (token t)", reason="its host burnt", now=now
    )


def confirm(row: RuntimeInstance, now: datetime, person: str = "bob") -> RuntimeInstance:
    return services.confirm_dead(row, person=person, by=person, now=now)


def test_two_people_declare_it_dead_and_the_audit_names_both(joined: Any, later: datetime) -> None:
    assert ask(joined.row, later).gone_at is None
    gone = confirm(joined.row, later)
    assert (gone.gone_at, gone.gone_why) == (later, GoneWhy.DEAD)
    lines = AuditEntry.objects.filter(subject__startswith="instance").order_by("id")
    assert [(line.verb, line.who) for line in lines] == [
        ("instance.ask_dead", "ada (token t)"),
        ("instance.declare_dead", "bob"),
    ]
    with pytest.raises(services.InstanceGone):
        services.poll(joined.key, now=later)


def test_one_person_is_not_two(joined: Any, later: datetime) -> None:
    ask(joined.row, later)
    with pytest.raises(services.SamePerson):
        confirm(joined.row, later, person="ada")
    assert joined.row.gone_at is None


def test_nobody_confirms_what_nobody_asked(joined: Any, later: datetime) -> None:
    with pytest.raises(services.NobodyAsked):
        confirm(joined.row, later)


def test_an_ask_ends_after_half_an_hour_and_may_be_made_anew(joined: Any, later: datetime) -> None:
    ask(joined.row, later)
    with pytest.raises(services.AlreadyAsked, match="ada asked for it already"):
        ask(joined.row, later, person="bob")
    over = later + DEAD_ASK_LASTS
    with pytest.raises(services.NobodyAsked):
        confirm(joined.row, over)
    assert ask(joined.row, over, person="bob").dead_asked_by == "bob"
    assert confirm(joined.row, over, person="ada").gone_at == over


@pytest.mark.parametrize("act", [ask, confirm])
def test_it_is_refused_while_the_instance_speaks(joined: Any, later: datetime, act: Any) -> None:
    if act is confirm:
        ask(joined.row, later)
    services.poll(joined.key, now=later)
    with pytest.raises(services.StillAlive):
        act(joined.row, later)


def test_a_word_after_the_ask_voids_it(joined: Any, later: datetime) -> None:
    ask(joined.row, later)
    services.report(joined.next_report(), now=later + timedelta(seconds=1))
    with pytest.raises(services.SpokeSince, match="ada"):
        confirm(joined.row, later + timedelta(minutes=2))


def test_whoever_asked_takes_it_back_and_nobody_else(joined: Any, later: datetime) -> None:
    ask(joined.row, later)
    with pytest.raises(services.NotYourAsk):
        services.withdraw_dead(joined.row, person="bob", by="bob", now=later)
    services.withdraw_dead(joined.row, person="ada", by="ada", now=later)
    with pytest.raises(services.NobodyAsked):
        confirm(joined.row, later)
    assert AuditEntry.objects.filter(verb="instance.withdraw_dead", who="ada").exists()


def test_an_ask_needs_a_reason_and_an_instance_that_is_not_gone(
    joined: Any, later: datetime
) -> None:
    with pytest.raises(services.ReasonMissing):
        services.ask_dead(joined.row, person="ada", by="ada", reason=" ", now=later)
    services.leave(joined.key, now=later)
    for act in (ask, confirm):
        with pytest.raises(Refused, match="gone since"):
            act(joined.row, later)

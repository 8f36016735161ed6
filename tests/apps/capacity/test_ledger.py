"""Reported usage reaches the ledger once, in the day that it belongs to."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connections, transaction

from capacity import queries, services
from capacity.domain.usage import MOST
from capacity.models import UsageDay, UsageMinute
from capacity.services import ledger
from tenants import services as tenants_services
from tenants.domain.reports import Report, Usage
from tenants.models import RuntimeInstance, Tenant, UsageLine
from tests import make

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


@pytest.fixture
def instance(cast: make.Cast, now: datetime) -> RuntimeInstance:
    return joined(cast, now)


def joined(cast: make.Cast, now: datetime, boot: str = "boot-1") -> RuntimeInstance:
    return tenants_services.join(
        cast.cell,
        name=f"agents-{boot}",
        build="1",
        boot=boot,
        longest_turn_seconds=60.0,
        longest_tool_seconds=30.0,
        plugins=[],
        stores=[],
        replaces=None,
        now=now,
    )


def say(instance: RuntimeInstance, seq: int, *lines: Usage, now: datetime) -> None:
    said = Report(
        instance=instance.key,
        boot=instance.boot,
        seq=seq,
        applied_version="",
        in_flight={},
        in_flight_older={},
        usage=lines,
    )
    tenants_services.report(said, now=now)


def lines(
    instance: RuntimeInstance, tenant: Tenant, minutes: list[datetime], **counts: Any
) -> None:
    """Keep one line a minute, as reports do."""
    seq = UsageLine.objects.count()
    UsageLine.objects.bulk_create(
        UsageLine(instance=instance, seq=seq + number, tenant=tenant, minute=minute, **counts)
        for number, minute in enumerate(minutes, 1)
    )


def days(tenant: Tenant) -> dict[str, int]:
    rows = UsageDay.objects.filter(tenant=tenant).order_by("day")
    return {str(row.day): row.tokens for row in rows}


# --- once -----------------------------------------------------------------------------------


@pytest.mark.django_db
def test_what_was_reported_is_in_its_minute_and_its_day(
    cast: make.Cast, instance: RuntimeInstance, now: datetime
) -> None:
    one = Usage("acme", now, turns=2, model_calls=5, tokens=700, refused={"rate": 3})
    two = Usage("acme", now, turns=1, model_calls=1, tokens=11, refused={"rate": 1, "budget": 2})
    say(instance, 1, one, Usage("bolt", now, tokens=9), now=now)
    say(instance, 2, two, Usage("acme", now - MINUTE, tokens=5), now=now)
    rolled = services.roll_up(now=now)
    assert (rolled.lines, rolled.tenants) == (4, {cast.acme.pk, cast.bolt.pk})
    minute = UsageMinute.objects.get(tenant=cast.acme, minute=now)
    assert (minute.turns, minute.model_calls, minute.tokens) == (3, 6, 711)
    assert minute.refused == {"rate": 4, "budget": 2}
    assert UsageMinute.objects.get(tenant=cast.acme, minute=now - MINUTE).tokens == 5
    assert days(cast.acme) == {"2026-03-02": 716}
    assert days(cast.bolt) == {"2026-03-02": 9}


@pytest.mark.django_db
def test_rolling_up_again_adds_nothing(
    cast: make.Cast, instance: RuntimeInstance, now: datetime
) -> None:
    say(instance, 1, Usage("acme", now, tokens=7), now=now)
    services.roll_up(now=now)
    assert services.roll_up(now=now).lines == 0
    say(instance, 1, Usage("acme", now, tokens=7), now=now)  # its answer was lost
    assert services.roll_up(now=now).lines == 0
    assert days(cast.acme) == {"2026-03-02": 7}


@pytest.mark.django_db
def test_a_later_line_is_added_to_what_is_there(
    cast: make.Cast, instance: RuntimeInstance, now: datetime
) -> None:
    for seq in (1, 2, 3):
        say(instance, seq, Usage("acme", now, tokens=7, refused={"rate": 1}), now=now)
        services.roll_up(now=now + seq * MINUTE)
    assert days(cast.acme) == {"2026-03-02": 21}
    assert UsageMinute.objects.get().refused == {"rate": 3}


@pytest.mark.django_db
def test_a_chunk_is_bounded_and_the_rest_comes_next(
    cast: make.Cast, instance: RuntimeInstance, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "LINES_AT_ONCE", 3)
    lines(instance, cast.acme, [now + MINUTE * number for number in range(7)], tokens=1)
    taken = [services.roll_up(now=now) for _ in range(3)]
    assert [(one.lines, one.more) for one in taken] == [(3, True), (3, True), (1, False)]
    assert days(cast.acme) == {"2026-03-02": 7}


@pytest.mark.django_db
def test_looking_in_vain_is_one_statement(
    cast: make.Cast, now: datetime, django_assert_num_queries: Any
) -> None:
    with django_assert_num_queries(3):  # and a savepoint, which is BEGIN and COMMIT elsewhere
        services.roll_up(now=now)


@pytest.mark.django_db
def test_names_of_reasons_that_nobody_knows_are_one_kind(
    cast: make.Cast, instance: RuntimeInstance, now: datetime
) -> None:
    lines(instance, cast.acme, [now], refused={f"because-{n}": 2 for n in range(50)})
    lines(instance, cast.acme, [now], would_refuse={"rate": 1, "x": 1})
    services.roll_up(now=now)
    row = UsageDay.objects.get()
    assert (row.refused, row.would_refuse) == ({"other": 100}, {"rate": 1, "other": 1})


@pytest.mark.django_db
def test_a_broken_runtimes_numbers_do_not_stop_the_ledger(
    cast: make.Cast, instance: RuntimeInstance, now: datetime
) -> None:
    lines(instance, cast.acme, [now, now], tokens=MOST)
    lines(instance, cast.bolt, [now], tokens=3)
    services.roll_up(now=now)
    assert days(cast.acme) == {"2026-03-02": MOST}
    assert days(cast.bolt) == {"2026-03-02": 3}


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_a_call_that_fails_has_taken_nothing(
    cast: make.Cast, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines(joined(cast, now), cast.acme, [now], tokens=7)
    with monkeypatch.context() as patched:
        patched.setattr(ledger, "UsageDay", None)
        with pytest.raises(AttributeError):
            services.roll_up(now=now)
    assert not UsageMinute.objects.exists()
    services.roll_up(now=now)
    assert days(cast.acme) == {"2026-03-02": 7}


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_lines_that_another_call_has_taken_are_passed_over(cast: make.Cast, now: datetime) -> None:
    instance = joined(cast, now)
    lines(instance, cast.acme, [now, now + MINUTE], tokens=1)
    with transaction.atomic():
        assert len(tenants_services.take_usage(most=1, now=now)) == 1
        found = in_threads([lambda: services.roll_up(now=now).lines])
    assert found == [1]
    # The first call took a line and counted nothing: here only to hold it.
    assert UsageLine.objects.filter(rolled_at=None).count() == 0


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_calls_at_the_same_time_count_each_line_once(
    cast: make.Cast, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "LINES_AT_ONCE", 10)
    instance = joined(cast, now)
    tenants = [cast.acme, cast.bolt, cast.core]
    for number in range(90):
        minutes = [now + (number % 7 + step) * MINUTE for step in range(3)]
        lines(instance, tenants[number % 3], minutes, tokens=1, refused={"rate": 1})

    def roll() -> int:
        taken = 0
        # Whoever finds nothing may only have come while others held the rest.
        while UsageLine.objects.filter(rolled_at=None).exists():
            taken += services.roll_up(now=now).lines
        return taken

    taken = in_threads([roll] * 6)
    assert sum(taken) == 270
    assert {tenant.slug: days(tenant) for tenant in tenants} == {
        tenant.slug: {"2026-03-02": 90} for tenant in tenants
    }
    assert sum(row.refused["rate"] for row in UsageMinute.objects.all()) == 270


def in_threads(work: list[Any]) -> list[Any]:
    """Do all of it at once, each on a connection of its own; return what each returned."""
    results: list[Any] = [None] * len(work)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = work[number]()
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a roll-up is stuck"
    if errors:
        raise errors[0]
    return results


# --- days -----------------------------------------------------------------------------------


def zoned(tenant: Tenant, zone: str) -> Tenant:
    Tenant.objects.filter(pk=tenant.pk).update(time_zone=zone)
    tenant.refresh_from_db()
    return tenant


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("zone", "expected"),
    [
        ("UTC", {"2026-03-01": 1, "2026-03-02": 2}),
        ("Europe/Berlin", {"2026-03-02": 3}),
        ("Asia/Kolkata", {"2026-03-02": 3}),
        ("America/New_York", {"2026-03-01": 3}),
    ],
)
def test_a_minute_counts_in_its_tenants_own_day(
    cast: make.Cast, instance: RuntimeInstance, now: datetime, zone: str, expected: dict[str, int]
) -> None:
    midnight = now.replace(hour=0)
    zoned(cast.acme, zone)
    lines(instance, cast.acme, [midnight - MINUTE, midnight, midnight + MINUTE], tokens=1)
    services.roll_up(now=now)
    assert days(cast.acme) == expected


@pytest.mark.django_db
def test_a_day_of_23_hours_takes_its_23_hours(
    cast: make.Cast, instance: RuntimeInstance, now: datetime
) -> None:
    zoned(cast.acme, "Europe/Berlin")
    first = datetime(2026, 3, 28, 20, 0, tzinfo=UTC)
    lines(instance, cast.acme, [first + HOUR * number for number in range(32)], tokens=1)
    services.roll_up(now=now)
    assert days(cast.acme) == {"2026-03-28": 3, "2026-03-29": 23, "2026-03-30": 6}


@pytest.mark.django_db
def test_a_late_line_corrects_a_day_that_has_ended(cast: make.Cast, now: datetime) -> None:
    evening = now.replace(hour=23, minute=59)
    instance = joined(cast, evening)
    later = evening + 3 * HOUR
    say(instance, 1, Usage("acme", evening, tokens=5), now=evening)
    services.roll_up(now=evening)
    # The control plane was away for three hours: a lapsed instance's usage counts all the same.
    said = Usage("acme", evening, tokens=6), Usage("acme", later, tokens=1)
    with pytest.raises(tenants_services.InstanceGone):
        say(instance, 2, *said, now=later)
    services.roll_up(now=later)
    assert days(cast.acme) == {"2026-03-02": 11, "2026-03-03": 1}


@pytest.mark.django_db
def test_after_a_change_of_zone_lines_count_in_days_of_the_new_one(
    cast: make.Cast, instance: RuntimeInstance, now: datetime
) -> None:
    lines(instance, cast.acme, [now.replace(hour=23)], tokens=1)
    services.roll_up(now=now)
    zoned(cast.acme, "Asia/Tokyo")
    lines(instance, cast.acme, [now.replace(hour=23)], tokens=2)
    services.roll_up(now=now)
    assert days(cast.acme) == {"2026-03-02": 1, "2026-03-03": 2}


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("off", "counted"),
    [
        (timedelta(0), timedelta(0)),
        (timedelta(minutes=59), timedelta(minutes=59)),
        (timedelta(minutes=61), timedelta(0)),
        (timedelta(days=400), timedelta(0)),
        (timedelta(minutes=-59), timedelta(minutes=-59)),
        (timedelta(hours=-2), timedelta(0)),
        (timedelta(days=-9000), timedelta(0)),
    ],
)
def test_usage_under_a_wrong_clock_counts_when_it_came(
    cast: make.Cast,
    instance: RuntimeInstance,
    now: datetime,
    off: timedelta,
    counted: timedelta,
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = [Usage("acme", now + off, tokens=7), Usage("acme", now, tokens=1)]
    say(instance, 1, *said, now=now)
    services.roll_up(now=now)
    assert sum(days(cast.acme).values()) == 8
    assert UsageMinute.objects.order_by("tokens").last().minute == now + counted  # type: ignore[union-attr]
    assert ("has a wrong clock" in caplog.text) == (off != counted)


@pytest.mark.django_db
def test_a_process_that_joined_anew_brings_what_it_could_not_report(
    cast: make.Cast, instance: RuntimeInstance, now: datetime
) -> None:
    later = now + 5 * HOUR
    again = tenants_services.join(
        cast.cell,
        name="agents",
        build="1",
        boot=instance.boot,
        longest_turn_seconds=60.0,
        longest_tool_seconds=30.0,
        plugins=[],
        stores=[],
        replaces=instance.key,
        now=later,
    )
    say(again, 1, Usage("acme", now, tokens=7), now=later)
    assert UsageLine.objects.get().minute == now


# --- budgets --------------------------------------------------------------------------------


def budget(tenant: Tenant, tokens: int | None, **columns: Any) -> None:
    newest = tenant.scopes.first()
    newest.pk, newest.version, newest.daily_token_budget = None, newest.version + 1, tokens
    newest.trial = False
    for name, value in columns.items():
        setattr(newest, name, value)
    newest.save(force_insert=True)


def marks() -> dict[str, datetime | None]:
    rows = Tenant.objects.exclude(budget_spent_until=None)
    return dict(rows.values_list("slug", "budget_spent_until"))


@pytest.mark.django_db
def test_a_budget_that_is_used_up_is_marked_until_the_tenants_midnight(
    cast: make.Cast, instance: RuntimeInstance, now: datetime
) -> None:
    zoned(cast.acme, "America/New_York")
    for tenant in (cast.acme, cast.bolt):
        budget(tenant, 100)
    lines(instance, cast.acme, [now], tokens=100)
    lines(instance, cast.bolt, [now], tokens=99)
    lines(instance, cast.core, [now], tokens=9_999)
    rolled = services.roll_up(now=now)
    assert services.mark_budgets(tenants=rolled.tenants, now=now) == 1
    assert marks() == {"acme": datetime(2026, 3, 3, 5, 0, tzinfo=UTC)}
    assert services.mark_budgets(now=now) == 0


@pytest.mark.django_db
def test_a_raised_budget_lets_go(cast: make.Cast, instance: RuntimeInstance, now: datetime) -> None:
    budget(cast.acme, 100)
    lines(instance, cast.acme, [now], tokens=100)
    services.roll_up(now=now)
    services.mark_budgets(now=now)
    budget(cast.acme, 5_000, trial=True)
    for of in ([], None):
        assert services.mark_budgets(tenants=of, now=now) == 0
    budget(cast.acme, 200)
    # With the next roll-up, whosever usage that is.
    assert services.mark_budgets(tenants=[cast.bolt.pk], now=now) == 1
    assert marks() == {}


@pytest.mark.django_db
def test_a_lowered_budget_holds_at_the_next_look(
    cast: make.Cast, instance: RuntimeInstance, now: datetime
) -> None:
    budget(cast.acme, 100)
    lines(instance, cast.acme, [now], tokens=60)
    services.roll_up(now=now)
    assert services.mark_budgets(now=now) == 0
    budget(cast.acme, 50)
    assert services.mark_budgets(now=now) == 1
    assert list(marks()) == ["acme"]


@pytest.mark.django_db
def test_the_next_day_lets_go_without_anybody(
    cast: make.Cast, instance: RuntimeInstance, now: datetime
) -> None:
    budget(cast.acme, 100)
    lines(instance, cast.acme, [now], tokens=100)
    services.roll_up(now=now)
    services.mark_budgets(now=now)
    tomorrow = now + DAY
    assert queries.usage_page(Tenant.objects.get(slug="acme"), now=tomorrow).spent_until is None
    assert queries.tokens_left([cast.acme], now=tomorrow) == {"acme": 100}
    assert services.mark_budgets(now=tomorrow) == 0


@pytest.mark.django_db
def test_what_is_left_is_of_the_tenants_own_day(
    cast: make.Cast, instance: RuntimeInstance, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoned(cast.bolt, "Asia/Tokyo")
    for tenant in (cast.acme, cast.bolt):
        budget(tenant, 100)
    evening = now.replace(hour=14, minute=30)
    for tenant in (cast.acme, cast.bolt, cast.core):
        lines(instance, tenant, [evening, evening + HOUR], tokens=30)
    services.roll_up(now=evening)
    everybody = [cast.acme, cast.bolt, cast.core]
    left = queries.tokens_left(everybody, now=evening + HOUR)
    assert left == {"acme": 40, "bolt": 70, "core": None}
    # Of so many that their ids are not named.
    monkeypatch.setattr(queries, "NAMED_MOST", 1)
    assert queries.tokens_left(everybody, now=evening + HOUR) == left
    assert queries.tokens_left(everybody[:2], now=evening + HOUR) == {"acme": 40, "bolt": 70}
    budget(cast.acme, 10)
    assert queries.tokens_left([cast.acme], now=evening)["acme"] == 0


@pytest.mark.django_db
def test_a_mark_that_a_raise_overtook_is_not_made(
    cast: make.Cast,
    instance: RuntimeInstance,
    now: datetime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget(cast.acme, 100)
    lines(instance, cast.acme, [now], tokens=100)
    services.roll_up(now=now)
    seen = queries.budgets_to_mark

    def and_then_raised(**asked: Any) -> Any:
        found = seen(**asked)
        budget(cast.acme, 500)
        return found

    monkeypatch.setattr(ledger.queries, "budgets_to_mark", and_then_raised)
    assert services.mark_budgets(now=now) == 0
    assert marks() == {}


# --- sweeping -------------------------------------------------------------------------------


@pytest.mark.django_db
def test_lines_and_minutes_are_kept_for_as_long_as_the_settings_say_and_days_for_good(
    cast: make.Cast, instance: RuntimeInstance, now: datetime
) -> None:
    lines(instance, cast.acme, [now, now + MINUTE], tokens=1)
    services.roll_up(now=now)
    lines(instance, cast.acme, [now + DAY], tokens=1)
    services.roll_up(now=now + DAY)
    lines(instance, cast.acme, [now], tokens=1)  # not in the ledger: it stays
    assert services.sweep_ledger(now=now + 35 * DAY) == 0
    assert services.sweep_ledger(now=now + 35 * DAY + MINUTE) == 2
    assert UsageLine.objects.count() == 2
    assert services.sweep_ledger(now=now + 101 * DAY) == 3
    assert (UsageLine.objects.count(), UsageMinute.objects.count()) == (1, 1)
    assert days(cast.acme) == {"2026-03-02": 2, "2026-03-03": 1}


@pytest.mark.django_db
def test_a_sweep_is_bounded(
    cast: make.Cast, instance: RuntimeInstance, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "SWEPT_AT_ONCE", 2)
    lines(instance, cast.acme, [now + MINUTE * n for n in range(5)], tokens=1)
    services.roll_up(now=now)
    swept = [services.sweep_ledger(now=now + 50 * DAY) for _ in range(4)]
    assert swept == [2, 2, 1, 0]


# --- building ahead -------------------------------------------------------------------------


def prewarmed(cast: make.Cast) -> list[str] | None:
    cast.cell.refresh_from_db()
    return cast.cell.document.get("prewarm")


@pytest.mark.django_db
def test_a_cell_is_told_who_is_active_now_and_who_was_at_this_hour_yesterday(
    cast: make.Cast, instance: RuntimeInstance, now: datetime
) -> None:
    lines(instance, cast.acme, [now - 5 * MINUTE], turns=3)
    lines(instance, cast.bolt, [now - DAY + 5 * MINUTE], turns=9)
    lines(instance, cast.core, [now - 2 * HOUR], turns=99)
    services.roll_up(now=now)
    version = cast.cell.policy_version
    assert services.publish_prewarm(now=now) == 1
    assert prewarmed(cast) == ["bolt", "acme"]
    assert cast.cell.policy_version == cast.cell.document_version > version


@pytest.mark.django_db
def test_who_is_active_is_published_anew_only_when_it_changed_much(
    cast: make.Cast, instance: RuntimeInstance, now: datetime
) -> None:
    lines(instance, cast.acme, [now - 5 * MINUTE], turns=3)
    lines(instance, cast.bolt, [now - 5 * MINUTE], turns=9)
    services.roll_up(now=now)
    services.publish_prewarm(now=now)
    told = cast.cell.policy_version
    lines(instance, cast.acme, [now - 4 * MINUTE], turns=30)
    services.roll_up(now=now)
    assert services.publish_prewarm(now=now) == 0  # another order, the same tenants
    lines(instance, cast.core, [now - 4 * MINUTE], turns=1)
    services.roll_up(now=now)
    assert services.publish_prewarm(now=now) == 1
    assert prewarmed(cast) == ["acme", "bolt", "core"]
    assert cast.cell.policy_version > told


@pytest.mark.django_db
def test_only_so_many_are_built_ahead(
    cast: make.Cast,
    instance: RuntimeInstance,
    now: datetime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queries, "PREWARMED_MOST", 2)
    for turns, tenant in enumerate((cast.acme, cast.bolt, cast.core), 1):
        lines(instance, tenant, [now - MINUTE], turns=turns)
    services.roll_up(now=now)
    services.publish_prewarm(now=now)
    assert prewarmed(cast) == ["core", "bolt"]

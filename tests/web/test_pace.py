"""What a move's page says of its pace: the sample, the relief, and a finish time that is missed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from django.urls import reverse

from migrations_app.domain.phases import Phase
from migrations_app.domain.throttle import Speed
from migrations_app.models import TenantMigration
from migrations_app.panels import progress
from migrations_app.panels.seen import seen
from tests.web.conftest import People

Moving = Callable[..., TenantMigration]
SAMPLE = Speed(sample_sessions=500, sample_seconds=12.5).as_json()


def fence(people: People, move: TenantMigration) -> str:
    return people.viewer.get(reverse("fence", args=[move.pk])).content.decode()


def test_the_fence_is_quoted_beside_what_the_first_500_took(moving: Moving, people: People) -> None:
    assert "first 500, 40.0 /s" in fence(people, moving(Phase.BACKFILL, speed=SAMPLE))


def test_a_sample_that_is_not_whole_is_not_shown(moving: Moving, people: People) -> None:
    thin = Speed(sample_sessions=499, sample_seconds=12.5).as_json()
    assert "Copy measured" not in fence(people, moving(Phase.BACKFILL, speed=thin))


@pytest.mark.parametrize(
    ("ease", "words"),
    # 5,188 sessions at 20 /s, copied and compared, are 4m 19s; eased to a quarter 17m 17s.
    [(1.0, ""), (0.25, ", missed by 12m 17s at this rate")],
    ids=["kept", "missed"],
)
def test_a_finish_time_that_a_slow_store_makes_it_miss_is_said(
    moving: Moving, at: datetime, ease: float, words: str
) -> None:
    move = moving(Phase.BACKFILL, finish_by=at + timedelta(minutes=5), ease=ease)
    found = seen(move.pk)
    assert found is not None
    panel = progress.progress(found, now=at)
    [row] = [row for row in panel.rows if row.label == "Pace"]
    assert row.value.endswith(f" UTC{words}")
    assert row.mark == ("differs" if words else "")


def test_the_page_says_which_store_is_slow_and_how_much(moving: Moving, people: People) -> None:
    why = "store-eu1-a answers 3.1 times slower than at its best: working a quarter of the time"
    move = moving(Phase.BACKFILL, ease=0.25, eased_why=why)
    html = people.viewer.get(reverse("progress", args=[move.pk])).content.decode()
    assert why in html
    assert "25" in html

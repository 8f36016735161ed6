"""A tenant's page of limits: edits with a reason, trials, versions, and who applies them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from capacity.models import UsageDay, UsageMinute
from tenants import services as tenants_services
from tenants.domain.limits import Limits
from tenants.models import AuditEntry, PolicyEntry, RuntimeInstance, Scope, Tenant
from tests import make
from tests.web.conftest import HTMX, People
from tests.web.test_pages import text_of

URL = "/tenants/acme/limits/"
GIVEN = {
    "max_concurrent_runs": "10",
    "runs_per_second": "0.5",
    "daily_token_budget": "30,000,000",
    "max_model_calls_per_run": "12",
    "weight": "1",
    "exact_budget": "",
    "tools": "these",
    "allowed_tools": "lookupAccount\nopenTicket",
    "tier": "pooled",
    "reason": "nightly replay",
    "seen": "1",
}


@pytest.fixture
def acme(here: make.Cast) -> Tenant:
    return here.acme


def post(people: People, act: str, **changes: str) -> Any:
    return people.operator.post(f"{URL}{act}/", GIVEN | changes)


def page(people: People, who: str = "operator") -> str:
    return text_of(getattr(people, who).get(URL).content.decode())


def holding(tenant: Tenant) -> Scope:
    return Scope.objects.filter(tenant=tenant, trial=False).order_by("-version")[0]


def test_limits_are_saved_as_a_version_with_who_and_why(acme: Tenant, people: People) -> None:
    assert post(people, "set")["Location"] == URL
    scope = holding(acme)
    assert (scope.version, scope.by, scope.reason) == (2, "olga", "nightly replay")
    assert (scope.max_concurrent_runs, scope.runs_per_second) == (10, 0.5)
    assert scope.daily_token_budget == 30_000_000
    assert scope.allowed_tools == ["lookupAccount", "openTicket"]
    text = page(people)
    assert "Tokens a day: no limit → 30,000,000" in text
    assert "New runs: no limit → 30 /min" in text
    assert "Holds 2" in text
    assert "Held 1" in text


def test_a_limit_is_taken_off_by_leaving_its_field_empty(acme: Tenant, people: People) -> None:
    post(people, "set")
    post(people, "set", seen="2", runs_per_second="", tools="all", allowed_tools="left here")
    scope = holding(acme)
    assert (scope.runs_per_second, scope.allowed_tools) == (None, None)
    assert "New runs: 30 /min → no limit" in page(people)


def test_no_tool_at_all_is_something_else_than_every_tool(acme: Tenant, people: People) -> None:
    post(people, "set", allowed_tools=" \n, ")
    assert holding(acme).allowed_tools == []
    assert "Tools: all of the agent’s → none" in page(people)


def test_a_tier_is_changed_as_configuration(acme: Tenant, people: People) -> None:
    post(people, "set", tier="bridge", weight="4")
    acme.refresh_from_db()
    assert (acme.tier, acme.weight) == ("bridge", 4.0)
    entry = PolicyEntry.objects.get(tenant=acme)
    assert entry.document["tier"] == "bridge"


@pytest.mark.parametrize(
    ("changes", "said", "field"),
    [
        ({"max_concurrent_runs": "0"}, "Runs at the same time can't be 0", "max_concurrent_runs"),
        ({"max_concurrent_runs": "-3"}, "can’t be “-3”", "max_concurrent_runs"),
        ({"max_concurrent_runs": "1.5"}, "can’t be “1.5”", "max_concurrent_runs"),
        ({"daily_token_budget": "³"}, "Tokens a day can’t be", "daily_token_budget"),
        ({"daily_token_budget": "9" * 30}, "Tokens a day can’t be", "daily_token_budget"),
        ({"runs_per_second": "nan"}, "New runs can’t be “nan”", "runs_per_second"),
        ({"runs_per_second": "1e9"}, "New runs can’t be", "runs_per_second"),
        ({"runs_per_second": "0"}, "New runs can't be", "runs_per_second"),
        ({"runs_per_second": "1.2.3"}, "New runs can’t be", "runs_per_second"),
        ({"weight": ""}, "Weight can’t be left out", "weight"),
        ({"weight": "-1"}, "Weight can’t be", "weight"),
        ({"allowed_tools": "a\na"}, "Name each once", "allowed_tools"),
        ({"exact_budget": "on", "daily_token_budget": ""}, "there is no budget", ""),
        ({"tier": "golden"}, "There is no tier", ""),
        ({"reason": " "}, "Say why", ""),
    ],
    ids=[
        "no run",
        "below nothing",
        "part of a run",
        "another script's digit",
        "too large",
        "not a number",
        "a power",
        "no rate",
        "two points",
        "no weight",
        "a weight below nothing",
        "a tool twice",
        "exact without a budget",
        "no tier",
        "no reason",
    ],
)
@pytest.mark.parametrize("act", ["set", "try"])
def test_what_no_runtime_could_hold_is_refused_with_what_was_typed(
    act: str, changes: dict[str, str], said: str, field: str, acme: Tenant, people: People
) -> None:
    answer = post(people, act, **changes)
    assert answer.status_code == 409
    html = answer.content.decode()
    assert said in text_of(html).replace("&#x27;", "'")
    assert "Nothing was changed." in html
    # What was typed beside it stays.
    assert 'value="12"' in html
    if field:
        assert 'aria-invalid="true"' in html[html.index(f'id="{field}"') :][:400]
    assert Scope.objects.filter(tenant=acme).count() == 1


@pytest.mark.parametrize("act", ["set", "try"])
def test_a_form_of_limits_that_hold_no_longer_is_refused(
    act: str, acme: Tenant, people: People
) -> None:
    post(people, "set")
    answer = post(people, act, max_concurrent_runs="77")
    assert answer.status_code == 409
    html = answer.content.decode()
    assert "olga has set version 2 since you looked" in html
    assert 'value="77"' in html
    # Saving once more means it.
    assert 'name="seen" value="2"' in html
    assert Scope.objects.filter(tenant=acme).count() == 2


@pytest.mark.parametrize("seen", ["", "x", "0", "\0", "9" * 60])
def test_a_form_without_a_version_is_refused(seen: str, acme: Tenant, people: People) -> None:
    assert post(people, "set", seen=seen).status_code == 409


def test_a_trial_counts_and_refuses_nothing(acme: Tenant, at: datetime, people: People) -> None:
    assert post(people, "try", tier="silo")["Location"] == URL
    assert holding(acme).version == 1
    acme.refresh_from_db()
    assert acme.tier == "pooled"
    UsageDay.objects.create(tenant=acme, day=at.date(), would_refuse={"rate": 41, "budget": 2})
    text = page(people)
    assert "Version 2 counts" in text
    assert "rate 41 41" in text
    assert "Runs at the same time no limit → 10" in text
    assert "On trial 2" in text


def test_a_trial_is_adopted_or_ended(acme: Tenant, people: People) -> None:
    post(people, "try")
    assert post(people, "trial/adopt", trial="2")["Location"] == URL
    assert (holding(acme).version, holding(acme).runs_per_second) == (3, 0.5)
    post(people, "try", seen="3", runs_per_second="0.25")
    assert post(people, "trial/end", trial="4")["Location"] == URL
    assert holding(acme).version == 3
    text = page(people)
    assert "Nothing is tried." in text
    assert "Tried 4" in text


@pytest.mark.parametrize("act", ["trial/adopt", "trial/end"])
def test_a_trial_that_is_another_by_now_is_not_touched(
    act: str, acme: Tenant, people: People
) -> None:
    post(people, "try")
    post(people, "try", seen="2", runs_per_second="0.25")
    answer = post(people, act, trial="2")
    assert answer.status_code == 409
    assert "olga began another trial since you looked, version 3" in answer.content.decode()
    acme.refresh_from_db()
    assert acme.trial is not None
    assert acme.trial.version == 3


def test_nothing_on_trial_can_not_be_ended(acme: Tenant, people: People) -> None:
    answer = post(people, "trial/end", trial="")
    assert answer.status_code == 409
    assert "Begin a trial first" in answer.content.decode()


def test_rotated_secrets_raise_the_generation(acme: Tenant, people: People) -> None:
    assert post(people, "rotate", reason="the key leaked")["Location"] == URL
    assert PolicyEntry.objects.get(tenant=acme).runner_generation == 2
    assert "Generation 2" in page(people)
    assert AuditEntry.objects.get(verb="tenant.rotate").reason == "the key leaked"
    assert post(people, "rotate", reason="").status_code == 409


def test_instances_that_have_not_applied_the_limits_come_first(
    acme: Tenant, people: People
) -> None:
    post(people, "set")
    needed = PolicyEntry.objects.get(tenant=acme).version
    RuntimeInstance.objects.filter(name="eu1-a-2").update(applied_version=needed)
    text = text_of(people.viewer.get(f"{URL}applied/").content.decode())
    assert "1 of 2 have" in text
    assert text.index("Not yet eu1-a-1") < text.index("Applied eu1-a-2")


def test_a_tier_stands_with_what_asks_for_it(
    acme: Tenant, at: datetime, here: make.Cast, people: People
) -> None:
    UsageMinute.objects.create(
        tenant=acme, minute=at.replace(second=0, microsecond=0), tokens=4_800_000
    )
    text = page(people)
    assert "In the last 7 days its busiest minute took 96 % of the quota of cell-eu1-a" in text
    assert "silo what the numbers ask for" in text
    assert "cell-eu1-a serves 2 other tenants and store-eu1-a holds 2 other tenants" in text
    here.cell.quota_tokens_per_minute = None
    here.cell.save()
    assert "Nobody has entered the quota of cell-eu1-a" in page(people)


@pytest.fixture
def article(acme: Tenant, here: make.Cast, at: datetime) -> dict[str, str]:
    """What article 004 says of a platform with a quota of 1,000 requests a minute."""
    here.cell.quota_requests_per_minute = 1_000
    here.cell.save()
    for other in (here.bolt, here.core):
        tenants_services.set_scope(
            other, limits=Limits(runs_per_second=0.1), by="ada", reason="small", now=at
        )
    return {
        "normal_requests_per_minute": "600",
        "model_calls_per_run": "4",
        "tokens_per_run": "8,000",
        "run_seconds": "12",
    }


def test_room_is_shown_before_anything_is_saved(
    article: dict[str, str], acme: Tenant, people: People
) -> None:
    asked = {**GIVEN, **article}
    html = people.operator.get(f"{URL}check/", asked, headers=HTMX).content.decode()
    text = text_of(html)
    assert "If you save this" in text
    assert "Fits" in text
    # 30 runs a minute of 4 calls on top of 600: 720, under 900.
    assert "Normal load 600 + largest limit, acme 120 Peak 720 90 % of 1,000, the mark 900" in text
    assert "At most 30 runs a minute of acme: the rate binds first." in text
    assert "600 + 120 = 720 requests a minute, under 900." in text
    assert 'width="60.00"' in html
    assert 'x="60.00" width="12.00"' in html
    assert Scope.objects.filter(tenant=acme).count() == 1


def test_what_nobody_has_measured_is_asked_for_instead_of_said_to_fit(
    article: dict[str, str], acme: Tenant, people: People
) -> None:
    post(people, "set", **article)
    html = people.operator.get(URL).content.decode()
    assert "Can’t know yet" in html
    assert "types “Model calls of a typical run” and “Tokens of a typical run” under" in html
    assert 'id="estimates" open' in html
    asked = {**GIVEN, **article, "tokens_per_run": ""}
    text = text_of(people.operator.get(f"{URL}check/", asked, headers=HTMX).content.decode())
    assert "Can’t know yet" in text
    assert "types “Tokens of a typical run” under “What nobody has measured yet”" in text
    assert "+ largest limit at least 0 Peak at least 0 90 % of 5,000,000" in text
    # What is seen not to fit by the other quota is not in doubt.
    asked |= {"runs_per_second": "2", "max_concurrent_runs": ""}
    text = text_of(people.operator.get(f"{URL}check/", asked, headers=HTMX).content.decode())
    assert "Would be refused" in text


def test_who_breaks_it_is_named_before_anything_is_saved(
    article: dict[str, str], acme: Tenant, people: People
) -> None:
    asked = {**GIVEN, **article, "runs_per_second": "2", "max_concurrent_runs": ""}
    text = text_of(people.operator.get(f"{URL}check/", asked, headers=HTMX).content.decode())
    assert "Would be refused" in text
    assert "acme breaks it: its 480 requests a minute with normal load make 1,080." in text
    asked |= {"runs_per_second": ""}
    text = text_of(people.operator.get(f"{URL}check/", asked, headers=HTMX).content.decode())
    assert "acme has no limit in requests a minute, so nothing keeps room free." in text


def test_slots_bind_where_they_carry_less_than_the_rate(
    article: dict[str, str], acme: Tenant, people: People
) -> None:
    asked = {**GIVEN, **article, "runs_per_second": "2"}
    text = text_of(people.operator.get(f"{URL}check/", asked, headers=HTMX).content.decode())
    assert "At most 50 runs a minute of acme: runs at the same time bind first." in text


def test_limits_without_room_are_refused_in_place_and_hold_when_somebody_insists(
    article: dict[str, str], acme: Tenant, people: People
) -> None:
    asked = {**article, "runs_per_second": "2", "max_concurrent_runs": ""}
    answer = post(people, "set", **asked)
    assert answer.status_code == 409
    html = answer.content.decode()
    assert "acme breaks the headroom" in html
    assert "Stay under 75 runs a minute" in html
    assert "Would be refused" in html
    for kept in ('value="2"', 'value="600"', 'value="nightly replay"'):
        assert kept in html
    assert Scope.objects.filter(tenant=acme).count() == 1
    assert post(people, "set", override="on", **asked).status_code == 302
    assert AuditEntry.objects.get(verb="tenant.override_headroom").reason == "nightly replay"


def test_a_trial_needs_no_room_until_it_is_adopted(
    article: dict[str, str], acme: Tenant, people: People
) -> None:
    acme.placement.cell.refresh_from_db()
    assert post(people, "try", runs_per_second="50").status_code == 302
    answer = post(people, "trial/adopt", trial="2")
    assert answer.status_code == 409
    assert "acme breaks the headroom" in answer.content.decode()
    assert post(people, "trial/adopt", trial="2", override="on").status_code == 302
    assert holding(acme).runs_per_second == 50.0


def test_a_tenant_with_a_model_account_of_its_own_is_not_held_against_the_quota(
    article: dict[str, str], acme: Tenant, people: People
) -> None:
    asked = {**GIVEN, **article, "runs_per_second": "50", "tier": "bridge"}
    text = text_of(people.operator.get(f"{URL}check/", asked, headers=HTMX).content.decode())
    assert "Fits" in text
    assert "has a model account of its own" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"runs_per_second": "x"}, "New runs can’t be “x”"),
        ({"model_calls_per_run": "-1"}, "Model calls of a typical run can’t be “-1”"),
        ({"normal_requests_per_minute": "9" * 18}, "Normal requests a minute can&#x27;t be"),
    ],
    ids=["a limit", "an estimate", "an estimate too large"],
)
def test_what_can_not_be_checked_says_why(
    changes: dict[str, str], said: str, acme: Tenant, people: People
) -> None:
    answer = people.operator.get(f"{URL}check/", {**GIVEN, **changes}, headers=HTMX)
    assert answer.status_code == 200
    assert "Not checked" in answer.content.decode()
    assert said in answer.content.decode()
    assert post(people, "set", **changes).status_code == 409


def test_a_cell_without_a_quota_is_held_against_nothing(
    acme: Tenant, here: make.Cast, people: People
) -> None:
    here.cell.quota_tokens_per_minute = None
    here.cell.save()
    assert "Nobody has entered a quota of cell-eu1-a" in page(people)
    assert post(people, "set").status_code == 302


def test_a_viewer_reads_and_is_offered_no_act(acme: Tenant, people: People) -> None:
    post(people, "set")
    html = people.viewer.get(URL).content.decode()
    assert "lookupAccount, openTicket" in html
    for act in ("set", "try", "rotate", "trial/end", "trial/adopt"):
        assert f"{URL}{act}/" not in html
        assert people.viewer.post(f"{URL}{act}/", GIVEN).status_code == 403
        assert people.operator.get(f"{URL}{act}/").status_code == 405


def test_a_thousand_versions_come_a_page_at_a_time_in_few_reads(
    acme: Tenant, at: datetime, people: People, django_assert_max_num_queries: Callable[..., object]
) -> None:
    Scope.objects.bulk_create(
        Scope(
            tenant=acme,
            version=number,
            max_concurrent_runs=number,
            at=at - timedelta(days=1),
            by="ada",
            reason="more",
        )
        for number in range(2, 1_002)
    )
    with django_assert_max_num_queries(48):
        text = page(people)
    assert "Runs at the same time: 1,000 → 1,001" in text
    # The last of a page is compared with the first of the next.
    assert "Runs at the same time: 981 → 982" in text
    assert "Page 1 of 51" in text


def test_an_unknown_tenant_has_no_limits(here: make.Cast, people: People) -> None:
    for path in ("", "applied/"):
        assert people.viewer.get(f"/tenants/nobody/limits/{path}").status_code == 404
    assert people.operator.post("/tenants/nobody/limits/set/", GIVEN).status_code == 404


def test_others_without_a_limit_are_named_and_keep_nobody_from_saving(
    acme: Tenant, here: make.Cast, people: People
) -> None:
    here.cell.quota_requests_per_minute = 1_000
    here.cell.save()
    text = page(people)
    assert "Does not fit" in text
    assert "bolt has no limit in requests a minute" in text
    assert post(people, "set").status_code == 302


def test_a_trial_that_somebody_began_meanwhile_is_looked_at_first(
    acme: Tenant, people: People
) -> None:
    post(people, "try")
    answer = post(people, "set")
    assert answer.status_code == 409
    assert "olga has tried version 2 since you looked" in answer.content.decode()

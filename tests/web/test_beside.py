"""Memory, side channels and artifacts on pages: how far each is, what a person may say of it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from datetime import datetime

import pytest
from django.urls import reverse

from migrations_app import channels
from migrations_app.domain.mismatch import Looks
from migrations_app.domain.phases import Phase
from migrations_app.models import ArtifactReference, MoveChannel, SideChannel, TenantMigration
from tenants.models import AuditEntry, Store
from tests import make, scene
from tests.web.conftest import HTMX, People, polled
from tests.web.test_pages import text_of

Moving = Callable[..., TenantMigration]


@pytest.fixture
def beside(moving: Moving) -> Moving:
    """Make a move that lists three side channels."""

    def make_move(phase: Phase, **columns: object) -> TenantMigration:
        move = moving(phase, **columns)
        scene.channels(move)
        return move

    return make_move


def panel(people: People, move: TenantMigration, name: str, query: str = "") -> str:
    answer = people.viewer.get(reverse(name, args=[move.pk]) + query, headers=HTMX)
    assert answer.status_code == 200
    return answer.content.decode()


def of(move: TenantMigration, name: str) -> MoveChannel:
    return move.channels.get(channel__name=name)


def check(move: TenantMigration, name: str, step: str) -> str:
    return reverse("check_channel", args=[move.pk, of(move, name).pk, step])


# --- side channels in a move --------------------------------------------------------------------


def test_each_channel_says_how_far_it_is_and_what_it_holds_up(
    beside: Moving, people: People, at: datetime
) -> None:
    move = beside(Phase.BACKFILL)
    row = of(move, "vectors")
    row.failures, row.state, row.detail, row.next_at = 2, "failed", "Exit code 3: no room", at
    row.save()
    text = text_of(panel(people, move, "channels"))
    assert "A step failed" in text
    assert "Exit code 3: no room" in text
    assert "tried again" in text
    assert "The fence waits For side channel vectors to be copied (Exit code 3: no room);" in text
    assert "side channel cache to be copied by a person" in text
    assert re.search(r"vectors required Failed holds the fence due now by a command", text)
    assert re.search(r"logs optional Open due now by a person", text)


def test_a_copied_channel_holds_the_flip_until_it_is_green(
    beside: Moving, people: People, at: datetime
) -> None:
    move = beside(Phase.VERIFY)
    move.channels.update(copied_at=at, state="copied")
    text = text_of(panel(people, move, "channels"))
    assert "TARGET waits" in text
    assert "cache required Copied holds TARGET" in text


@pytest.mark.parametrize("phase", [Phase.BACKFILL, Phase.VERIFY, Phase.SOAK])
def test_an_operator_checks_a_step_off_with_a_note(
    phase: Phase, beside: Moving, people: People
) -> None:
    move = beside(phase)
    url = check(move, "logs", "copy")
    asked = text_of(people.operator.get(url, headers=HTMX).content.decode())
    assert "Is logs copied?" in asked
    answer = people.operator.post(
        url, {"reason": "redirected them", "seen": phase.value}, headers=HTMX
    )
    assert answer.status_code == 200
    assert answer["HX-Trigger"] == "moved"
    row = of(move, "logs")
    assert (row.state, row.detail, row.by) == ("copied", "redirected them", "olga")
    assert AuditEntry.objects.filter(verb="channel.check_off", reason="redirected them").exists()
    assert "redirected them" in panel(people, move, "channels")


def test_without_a_script_the_page_comes_back_to_the_panel(beside: Moving, people: People) -> None:
    move = beside(Phase.SOAK)
    answer = people.operator.post(check(move, "logs", "copy"), {"reason": "done", "seen": "soak"})
    assert answer["Location"] == f"/moves/mv-{move.pk}/#move-channels"


def test_a_check_off_without_a_note_is_refused_in_its_dialog(
    beside: Moving, people: People
) -> None:
    move = beside(Phase.BACKFILL)
    answer = people.operator.post(check(move, "logs", "copy"), {"reason": " "}, headers=HTMX)
    assert answer.status_code == 409
    assert of(move, "logs").state == "open"


def test_a_stale_page_checks_nothing_off(beside: Moving, people: People) -> None:
    move = beside(Phase.VERIFY)
    url = check(move, "logs", "copy")
    answer = people.operator.post(url, {"reason": "done", "seen": "backfill"}, headers=HTMX)
    assert answer.status_code == 409
    assert "The page showed BACKFILL" in answer.content.decode()
    assert of(move, "logs").state == "open"


def test_a_check_off_is_taken_back(beside: Moving, people: People, at: datetime) -> None:
    move = beside(Phase.BACKFILL)
    channels.check_off(of(move, "logs"), step="copy", note="done", by="olga", now=at)
    url = f"{check(move, 'logs', 'copy')}?undo=1"
    html = people.operator.get(url, headers=HTMX).content.decode()
    assert "Take back that logs is copied?" in text_of(html)
    # The form goes back to where it came from, and means the same.
    action = re.search(r'hx-post="([^"]*)"', html)
    assert action is not None
    given = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', html))
    people.operator.post(action[1], given | {"reason": "not whole"}, headers=HTMX)
    assert of(move, "logs").state == "open"


def test_in_the_soak_a_programs_step_is_a_persons(
    beside: Moving, people: People, at: datetime
) -> None:
    move = beside(Phase.SOAK)
    row = of(move, "vectors")
    row.failures, row.state, row.detail, row.next_at = 2, "failed", "Exit code 3: no room", at
    row.save()
    text = text_of(panel(people, move, "channels"))
    # No program puts old values over what the target serves.
    assert re.search(r"vectors required Failed – by a command", text)
    assert "tried again" not in text
    url = check(move, "vectors", "copy")
    assert "which is not called for it any more" in text_of(
        people.operator.get(url, headers=HTMX).content.decode()
    )
    channels.check_off(row, step="copy", note="by hand", by="olga", now=at)
    html = people.operator.get(f"{url}?undo=1", headers=HTMX).content.decode()
    assert "Its program is not called while store-" in text_of(html)
    assert "is called again" not in text_of(html)


def test_a_viewer_is_offered_no_word(beside: Moving, people: People) -> None:
    move = beside(Phase.BACKFILL)
    assert "Check off" not in panel(people, move, "channels")
    html = people.operator.get(reverse("channels", args=[move.pk])).content.decode()
    assert html.count("Check off…") == 3


def test_nothing_is_checked_off_any_more_once_a_move_has_ended(
    beside: Moving, people: People
) -> None:
    html = people.operator.get(reverse("channels", args=[beside(Phase.DONE).pk])).content.decode()
    assert "Check off" not in html


def test_a_channel_of_another_move_is_not_found(
    beside: Moving, here: make.Cast, people: People, at: datetime
) -> None:
    move = beside(Phase.BACKFILL)
    other = scene.move(here, Phase.BACKFILL, now=at, tenant=here.core)
    url = reverse("check_channel", args=[other.pk, of(move, "logs").pk, "copy"])
    assert people.operator.get(url).status_code == 404
    assert people.operator.get(check(move, "logs", "burn")).status_code == 404


def test_a_tenant_without_channels_is_warned_of(moving: Moving, people: People) -> None:
    text = text_of(panel(people, moving(Phase.BACKFILL), "channels"))
    assert "None registered" in text
    assert "nobody would be told" in text


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("", "", "neither store-eu1-a nor store-eu1-b names a memory service"),
        ("env:A", "", "goes over only as a side channel"),
        ("env:A", "env:A", "lead to one memory service"),
        ("env:A", "env:B", "6,300 sessions given to the service of store-eu1-b, 50"),
    ],
    ids=["none", "left behind", "one", "two"],
)
def test_memory_is_named_with_its_state(
    source: str, target: str, said: str, moving: Moving, people: People
) -> None:
    move = moving(Phase.BACKFILL, remembered=6_300)
    Store.objects.filter(pk=move.source_store_id).update(memory_from=source)
    Store.objects.filter(pk=move.target_store_id).update(memory_from=target)
    assert said in text_of(panel(people, move, "channels"))


# --- which there are ----------------------------------------------------------------------------


FORM = {
    "name": "vectors",
    "about": "the index",
    "required": "on",
    "copy_by": "person",
    "copy_step": "",
    "verify_by": "person",
    "verify_step": "",
    "reason": "agents look answers up there",
}


def test_a_channel_is_registered_for_a_tenant_and_listed_on_its_page(
    here: make.Cast, people: People
) -> None:
    answer = people.admin.post("/channels/new/", FORM | {"tenant": "acme"})
    assert answer["Location"] == "/channels/?tenant=acme"
    channel = SideChannel.objects.get()
    assert (channel.tenant, channel.name, channel.required) == (here.acme, "vectors", True)
    assert AuditEntry.objects.get(verb="channel.register").reason == FORM["reason"]
    for url in ("/channels/?tenant=acme", "/tenants/acme/"):
        assert "vectors" in people.viewer.get(url).content.decode()
    assert "vectors" not in people.viewer.get("/channels/?tenant=core").content.decode()


def test_a_channel_of_an_agent_counts_for_each_of_its_tenants(
    here: make.Cast, people: People
) -> None:
    people.admin.post("/channels/new/", FORM | {"agent": "support"})
    for slug in ("acme", "bolt"):
        assert "vectors" in people.viewer.get(f"/channels/?tenant={slug}").content.decode()
    text = text_of(people.viewer.get("/tenants/bolt/").content.decode())
    assert "of every tenant of support" in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"copy_by": "callable", "copy_step": "os:system"}, "os"),
        ({"copy_by": "command", "copy_step": "../rm -rf"}, "is no command"),
        ({"copy_by": "person", "copy_step": "ls"}, "runs nothing"),
        ({"name": ""}, "Give it a name."),
        ({"reason": ""}, "Say why"),
    ],
    ids=["not allowed", "no program", "a person's", "no name", "no reason"],
)
def test_what_is_no_channel_is_refused_in_words_and_kept_in_the_form(
    given: dict[str, str], said: str, here: make.Cast, people: People
) -> None:
    answer = people.admin.post("/channels/new/", FORM | {"tenant": "acme"} | given)
    html = answer.content.decode()
    assert answer.status_code == 409
    assert said in html
    assert ">the index</textarea>" in html
    assert not SideChannel.objects.exists()


def test_only_an_admin_registers_edits_and_removes(here: make.Cast, people: People) -> None:
    people.admin.post("/channels/new/", FORM | {"tenant": "acme"})
    page = f"/channels/{SideChannel.objects.get().pk}/"
    for url in ("/channels/new/", page, f"{page}remove/"):
        answer = people.operator.post(url, FORM | {"tenant": "acme", "name": "other"})
        assert answer.status_code == 403
    assert SideChannel.objects.get().name == "vectors"
    html = people.operator.get("/channels/?tenant=acme").content.decode()
    assert "Register a channel" not in html
    assert page not in html


def test_a_name_that_is_taken_is_refused(here: make.Cast, people: People) -> None:
    people.admin.post("/channels/new/", FORM | {"tenant": "acme"})
    answer = people.admin.post("/channels/new/", FORM | {"tenant": "acme"})
    assert answer.status_code == 409
    assert "has a side channel vectors already" in answer.content.decode()


def test_a_channel_without_an_owner_is_refused(here: make.Cast, people: People) -> None:
    answer = people.admin.post("/channels/new/", FORM)
    assert answer.status_code == 409
    assert "belongs to an agent or to a tenant" in answer.content.decode()


def test_a_channel_is_edited_and_removed(here: make.Cast, people: People) -> None:
    people.admin.post("/channels/new/", FORM | {"tenant": "acme"})
    channel = SideChannel.objects.get()
    page = f"/channels/{channel.pk}/"
    assert 'value="vectors"' in people.admin.get(page).content.decode()
    people.admin.post(page, {**FORM, "about": "two indexes", "required": ""})
    channel.refresh_from_db()
    assert (channel.about, channel.required) == ("two indexes", False)
    refused = people.admin.post(f"{page}remove/", {"reason": ""})
    assert refused.status_code == 409
    people.admin.post(f"{page}remove/", {"reason": "gone"})
    assert people.admin.get(page).status_code == 404
    assert "vectors" not in people.viewer.get("/channels/?tenant=acme").content.decode()


@pytest.mark.parametrize("query", ["tenant=nobody", "agent=nobody", "tenant=%00"])
def test_an_unknown_owner_is_not_found(query: str, here: make.Cast, people: People) -> None:
    assert people.viewer.get(f"/channels/?{query}").status_code == 404


# --- artifacts ----------------------------------------------------------------------------------


@pytest.fixture
def renumbered(moving: Moving) -> TenantMigration:
    move = moving(Phase.VERIFY)
    scene.artifacts(move, 45)
    move.refresh_from_db()
    return move


def test_artifacts_are_counted_and_timed(renumbered: TenantMigration, people: People) -> None:
    text = text_of(panel(people, renumbered, "artifacts"))
    assert "Versions, whole on both sides 45 of 45" in text
    assert "Amount 92.2 kB" in text
    assert "Copied and read back 31.5 /s" in text
    assert "Per user: 1" in text
    assert "u-00371 Equal 1 45 45" in text


def test_numbers_that_changed_are_listed_page_by_page(
    renumbered: TenantMigration, people: People
) -> None:
    html = panel(people, renumbered, "artifacts", "?numbers_page=3")
    text = text_of(html)
    assert "Numbers that changed: 45" in text
    assert "Page 3 of 3" in text
    assert "user:report.pdf u-00371 45 44" in text
    # A poll asks for the page that is shown.
    assert "numbers_page=3" in polled(html, reverse("artifacts", args=[renumbered.pk]))


def test_every_place_that_names_one_can_be_downloaded(
    renumbered: TenantMigration, people: People
) -> None:
    ArtifactReference.objects.filter(session_id="s-00000").update(user_id="=cmd()")
    answer = people.viewer.get(reverse("references", args=[renumbered.pk]))
    assert answer["Content-Type"] == "text/csv; charset=utf-8"
    body = b"".join(answer.streaming_content).decode()  # type: ignore[attr-defined]
    rows = list(csv.DictReader(io.StringIO(body)))
    assert len(rows) == 45
    # No spreadsheet takes a name for a formula.
    assert rows[0]["user"] == "'=cmd()"
    assert rows[1] == {
        "user": "u-00371",
        "session": "s-00001",
        "place": "event 2 actions.artifact_delta.user:report.pdf",
        "artifact": "user:report.pdf",
        "source_version": "2",
        "target_version": "1",
    }


@pytest.mark.parametrize(
    ("source", "target", "apart", "said"),
    [
        ("", "", None, "Neither store-eu1-a nor store-eu1-b names an artifact service."),
        ("", "env:B", None, "there is nothing to copy"),
        ("env:A", "", None, "none can be copied"),
        ("env:A", "env:A", None, "keep them in one place"),
        ("env:A", "env:B", False, "keep them in one place"),
        ("env:A", "env:B", None, "not looked at yet"),
    ],
    ids=["none", "none there", "none here", "one reference", "one place", "not yet"],
)
def test_why_no_artifacts_go_along_is_said(
    source: str, target: str, apart: bool | None, said: str, moving: Moving, people: People
) -> None:
    move = moving(Phase.BACKFILL, artifacts_apart=apart)
    Store.objects.filter(pk=move.source_store_id).update(artifacts_from=source)
    Store.objects.filter(pk=move.target_store_id).update(artifacts_from=target)
    assert said in text_of(panel(people, move, "artifacts"))


def test_an_artifact_that_differs_is_named_and_repaired(
    renumbered: TenantMigration, people: People, at: datetime
) -> None:
    row = renumbered.mismatches.create(
        user_id="u-00371",
        artifact="user:report.pdf",
        part="artifact",
        first_difference="user:report.pdf: version 7 is another one on the target",
        looks_like=Looks.STALE_ARTIFACT,
        found_at=at,
        found_in=Phase.VERIFY,
    )
    text = text_of(panel(people, renumbered, "artifacts"))
    assert "1 differs" in text
    assert "u-00371 Differs" in text
    url = reverse("mismatches", args=[renumbered.pk])
    html = people.operator.get(f"{url}?part=artifact", headers=HTMX).content.decode()
    assert "Stale artifact version: another one stands under its number." in html
    assert 'aria-label="Re-copy artifact user:report.pdf of user u-00371"' in html
    assert "Reconcile user" not in html
    people.operator.post(
        reverse("recopy", args=[renumbered.pk]), {"only": row.pk, "seen": "verify"}
    )
    row.refresh_from_db()
    assert row.repair_requested_by == "olga"


def test_pages_that_no_table_has_are_the_last_or_the_first(
    renumbered: TenantMigration, people: People
) -> None:
    for query in ("?users_page=99", "?numbers_page=abc", "?references_page=-1"):
        panel(people, renumbered, "artifacts", query)

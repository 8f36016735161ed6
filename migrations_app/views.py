"""Pages and fragments of moves. Each act is one service call, asked for with a reason."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import urlencode

from django import forms
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    HttpResponseBase,
    JsonResponse,
    StreamingHttpResponse,
)
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from durable.clock import database_now
from durable.errors import Refused
from migrations_app import figures, queries, restored, services
from migrations_app.domain.phases import Mode, Phase, pausable_before
from migrations_app.domain.verbs import words
from migrations_app.dry_run import dry_run, paced
from migrations_app.models import Mismatch, RestoreFinding, TenantMigration
from migrations_app.panels import artifacts as artifacts_panel
from migrations_app.panels import channels as channels_panel
from migrations_app.panels import dialogs, lists, rows
from migrations_app.panels import diff as diff_panel
from migrations_app.panels import fence as fence_panel
from migrations_app.panels import head as head_panel
from migrations_app.panels import mismatches as mismatch_panel
from migrations_app.panels import progress as progress_panel
from migrations_app.panels import split as split_panel
from migrations_app.panels.dialog import Dialog
from migrations_app.panels.lists import MovesFilter
from migrations_app.panels.mismatches import MismatchFilter
from migrations_app.panels.seen import Seen
from migrations_app.panels.seen import seen as read_move
from tenants import panels as tenants_panels
from tenants import queries as tenants_queries
from tenants.domain.roles import Role
from tenants.domain.words import counted
from tenants.models import Cell, Store, Tenant
from tenants.views import (
    access,
    by_request_kind,
    csv_file,
    fragment,
    nothing_changed,
    page_number,
)

Read = Callable[[Seen, datetime], Any]


# --- the move's panels -------------------------------------------------------------------------


def _fence(seen: Seen, now: datetime) -> fence_panel.FencePanel | None:
    # Before anything was counted or timed a quote would be a guess.
    copies = seen.phase == Phase.BACKFILL and seen.move.passes > 0
    # Of the cell alone there is nothing to count.
    ahead = (copies or (seen.of_cell and seen.phase == Phase.PREPARE)) and not seen.aborting
    closing = seen.phase == Phase.REVERSE_DRAIN and seen.move.fence_closed_at is None
    asked = ahead or closing or seen.phase == Phase.SOAK or seen.both_serve
    quote = queries.fence_quote(seen.move, now=now) if asked else None
    return fence_panel.fence(seen, quote, now=now)


# Every panel of the page: a template `_NAME.html`, a view and a URL of one name.
PANELS: dict[str, Read] = {
    "head": lambda seen, now: head_panel.head(seen, now=now),
    "facts": lambda seen, now: progress_panel.facts(seen, now=now),
    "phases": lambda seen, now: progress_panel.track(seen, now=now),
    "progress": lambda seen, now: progress_panel.progress(seen, now=now),
    "fence": _fence,
    "instances": lambda seen, now: fence_panel.instances(seen, now=now),
    "split": lambda seen, now: split_panel.split(seen, now=now),
    "channels": lambda seen, now: channels_panel.channels(seen),
    "artifacts": lambda seen, now: artifacts_panel.artifacts(seen, artifacts_panel.Pages()),
    "checks": lambda seen, now: rows.checks(seen),
    "mismatches": lambda seen, now: mismatch_panel.mismatches(seen, MismatchFilter()),
    "log": lambda seen, now: rows.log(seen),
    "samples": lambda seen, now: rows.sample_rows(seen),
}


# Without meaning where nothing is copied.
OF_A_COPY = frozenset({"split", "channels", "artifacts", "mismatches", "samples"})


def _version(seen: Seen, panel: Any) -> str:
    """Return a short tag of what a panel shows: equal tags mean that nothing visible changed.

    How often it is polled is part of it, or a panel without news would be polled after the end.
    """
    return f"{zlib.crc32(repr((seen.every, panel)).encode()):08x}"


def _read(request: HttpRequest, name: str, seen: Seen, now: datetime) -> Any:
    """Read a panel. Tables with a filter or pages keep them: from the address, or their form."""
    given = request.POST if request.method == "POST" else request.GET
    if name == "mismatches":
        return mismatch_panel.mismatches(seen, mismatch_panel.wanted(given))
    if name == "artifacts":
        return artifacts_panel.artifacts(seen, artifacts_panel.wanted(given))
    return PANELS[name](seen, now)


def _panel(request: HttpRequest, pk: int, name: str, **more: Any) -> HttpResponse:
    now, seen = database_now(), read_seen(pk)
    panel = _read(request, name, seen, now)
    return fragment(
        request,
        f"migrations_app/_{name}.html",
        version=_version(seen, panel),
        now=now,
        read=lambda: {"seen": seen, "move": seen.move, "panel": panel, **more},
        status=409 if more.get("refused") else 200,
    )


def _page(request: HttpRequest, seen: Seen, *, refused: str = "") -> HttpResponse:
    now = database_now()
    names = [name for name in PANELS if not (seen.of_cell and name in OF_A_COPY)]
    found = {name: _read(request, name, seen, now) for name in names}
    context = {
        "now": now,
        "seen": seen,
        "move": seen.move,
        "panels": found,
        "versions": {name: _version(seen, panel) for name, panel in found.items()},
        "again": seen.move.passes > 1,
        "changed_in_words": rows.changed_in_words(seen),
        "refused": refused,
    }
    return render(request, "migrations_app/move.html", context, status=409 if refused else 200)


def read_seen(pk: int) -> Seen:
    seen = read_move(pk)
    if seen is None:
        raise Http404(f"There is no move mv-{pk}.")
    return seen


@require_safe
@access(Role.VIEWER)
def move(request: HttpRequest, pk: int) -> HttpResponse:
    """Everything about one move."""
    return _page(request, read_seen(pk))


@require_safe
@access(Role.VIEWER)
def head(request: HttpRequest, pk: int) -> HttpResponse:
    """Title, status words and buttons; announces a change of the words."""
    return _panel(request, pk, "head")


@require_safe
@access(Role.VIEWER)
def facts(request: HttpRequest, pk: int) -> HttpResponse:
    """The row of labelled values."""
    return _panel(request, pk, "facts")


@require_safe
@access(Role.VIEWER)
def phases(request: HttpRequest, pk: int) -> HttpResponse:
    """The seven phases with their times."""
    return _panel(request, pk, "phases")


@require_safe
@access(Role.VIEWER)
def progress(request: HttpRequest, pk: int) -> HttpResponse:
    """How far the running phase is."""
    return _panel(request, pk, "progress")


@require_safe
@access(Role.VIEWER)
def fence(request: HttpRequest, pk: int) -> HttpResponse:
    """The fence's quote, or its estimate beside the actual."""
    return _panel(request, pk, "fence")


@require_safe
@access(Role.VIEWER)
def instances(request: HttpRequest, pk: int) -> HttpResponse:
    """Who has closed the fence, and who is missing."""
    return _panel(request, pk, "instances")


@require_safe
@access(Role.VIEWER)
def split(request: HttpRequest, pk: int) -> HttpResponse:
    """Who serves what while both cells do."""
    return _panel(request, pk, "split")


@require_safe
@access(Role.VIEWER)
def channels(request: HttpRequest, pk: int) -> HttpResponse:
    """Memory and side channels."""
    return _panel(request, pk, "channels")


@require_safe
@access(Role.VIEWER)
def artifacts(request: HttpRequest, pk: int) -> HttpResponse:
    """Artifacts: how much, whose numbers changed, and what names the old ones."""
    return _panel(request, pk, "artifacts")


@require_safe
@access(Role.VIEWER)
def references(request: HttpRequest, pk: int) -> HttpResponseBase:
    """Every place that names a renumbered version, as a file for whoever mends them."""
    move = read_seen(pk).move
    return csv_file(artifacts_panel.reference_rows(move), f"{move}-references")


@require_safe
@access(Role.VIEWER)
def checks(request: HttpRequest, pk: int) -> HttpResponse:
    """What PREPARE looked at."""
    return _panel(request, pk, "checks")


@require_safe
@access(Role.VIEWER)
def mismatches(request: HttpRequest, pk: int) -> HttpResponse:
    """What differs, with an action on each row."""
    return _panel(request, pk, "mismatches")


@require_safe
@access(Role.VIEWER)
def log(request: HttpRequest, pk: int) -> HttpResponse:
    """The event log, newest first."""
    return _panel(request, pk, "log")


@require_safe
@access(Role.VIEWER)
def samples(request: HttpRequest, pk: int) -> HttpResponse:
    """The chart's numbers as a table."""
    return _panel(request, pk, "samples")


@require_safe
@access(Role.VIEWER)
def changed_figure(request: HttpRequest, pk: int) -> HttpResponse:
    """The chart "changed sessions while copying"."""
    seen = read_seen(pk)
    return JsonResponse(figures.changed(seen, rows.samples(seen.move)))


# --- acts ---------------------------------------------------------


def _ask(request: HttpRequest, pk: int, verb: str, call: Callable[..., Any]) -> HttpResponse:
    """Show the dialog of an act (GET), or carry it out (POST) and close the dialog.

    htmx gets the dialog's form; without JavaScript the same form is a page of its own.
    """
    seen, refused = read_seen(pk), ""
    if request.method == "POST":
        try:
            call(
                seen.move,
                by=request.user.get_username(),
                reason=request.POST.get("reason", "").strip(),
                seen=request.POST.get("seen"),
                now=database_now(),
            )
        except Refused as refusal:
            refused, seen = nothing_changed(refusal), read_seen(pk)
        else:
            return _done(request, seen.move, verb)
    now = database_now()
    return show_dialog(request, seen, dialogs.dialog(seen, verb, now=now), refused, now)


def show_dialog(
    request: HttpRequest,
    seen: Seen,
    dialog: Dialog,
    refused: str,
    now: datetime,
    rows: Sequence[int] = (),
) -> HttpResponse:
    """Draw a dialog's form: for htmx alone, otherwise as a page of its own."""
    context = {
        "now": now,
        "seen": seen,
        "move": seen.move,
        "dialog": dialog,
        "ids": ",".join(str(pk) for pk in rows),
        # With its query: what an act is about may stand there.
        "url": request.get_full_path(),
        "refused": refused,
        "given": request.POST,
    }
    template = "migrations_app/_dialog.html" if request.htmx else "migrations_app/ask.html"
    return by_request_kind(render(request, template, context, status=409 if refused else 200))


def _done(request: HttpRequest, move: TenantMigration, verb: str) -> HttpResponse:
    """Answer an act that was accepted: panels look at once, and the page says so."""
    if not request.htmx:
        return redirect("move", pk=move.pk)
    text = f"{words(verb, move.phase, move.mode)}, {move} {move.tenant}: asked for."
    response = render(request, "migrations_app/_done.html", {"text": text})
    response.headers["HX-Trigger"] = "moved"
    return response


@require_http_methods(["GET", "HEAD", "POST"])
@access(Role.OPERATOR)
def pause(request: HttpRequest, pk: int) -> HttpResponse:
    """Stop where it is."""
    return _ask(request, pk, "pause", services.pause)


@require_http_methods(["GET", "HEAD", "POST"])
@access(Role.OPERATOR)
def abort(request: HttpRequest, pk: int) -> HttpResponse:
    """Take the way out."""
    return _ask(request, pk, "abort", services.abort)


@require_http_methods(["GET", "HEAD", "POST"])
@access(Role.OPERATOR)
def close_fence(request: HttpRequest, pk: int) -> HttpResponse:
    """Start the drain."""
    return _ask(request, pk, "close_fence", services.close_fence)


@require_http_methods(["GET", "HEAD", "POST"])
@access(Role.OPERATOR)
def cancel_fence(request: HttpRequest, pk: int) -> HttpResponse:
    """Take the drain back before its fence closes."""
    return _ask(request, pk, "cancel_fence", services.cancel_fence)


@require_http_methods(["GET", "HEAD", "POST"])
@access(Role.OPERATOR)
def hold_fence(request: HttpRequest, pk: int) -> HttpResponse:
    """Move the fence's deadline, once."""
    seconds = _number(request.POST.get("seconds", ""))
    return _ask(request, pk, "hold_fence", partial(services.hold_fence, seconds=seconds))


@require_http_methods(["GET", "HEAD", "POST"])
@access(Role.OPERATOR)
def confirm_offboard(request: HttpRequest, pk: int) -> HttpResponse:
    """Allow OFFBOARD to delete the source's copy."""
    typed = request.POST.get("typed", "").strip()
    return _ask(request, pk, "confirm_offboard", partial(services.confirm_offboard, typed=typed))


@require_http_methods(["GET", "HEAD", "POST"])
@access(Role.OPERATOR)
def leave_behind(request: HttpRequest, pk: int) -> HttpResponse:
    """End an abort that can't clean its target."""
    return _ask(request, pk, "leave_behind", services.leave_behind)


@require_http_methods(["GET", "HEAD", "POST"])
@access(Role.OPERATOR)
def rollback(request: HttpRequest, pk: int) -> HttpResponse:
    """Take the tenant back to the source."""
    budget = request.POST.get("budget_seconds", "").strip()
    call = partial(services.rollback, budget_seconds=_number(budget) if budget else None)
    return _ask(request, pk, "rollback", call)


@require_http_methods(["GET", "HEAD", "POST"])
@access(Role.OPERATOR)
def cancel_rollback(request: HttpRequest, pk: int) -> HttpResponse:
    """Take a rollback back before its fence closes."""
    return _ask(request, pk, "cancel_rollback", services.cancel_rollback)


@require_http_methods(["GET", "HEAD", "POST"])
@access(Role.OPERATOR)
def flip(request: HttpRequest, pk: int) -> HttpResponse:
    """Give the word for TARGET."""
    return _ask(request, pk, "flip", services.flip)


@require_http_methods(["GET", "HEAD", "POST"])
@access(Role.OPERATOR)
def set_pace(request: HttpRequest, pk: int) -> HttpResponse:
    """Change how fast BACKFILL copies."""
    return _ask(request, pk, "set_pace", partial(_set_pace, given=request.POST))


def _set_pace(
    move: TenantMigration, *, given: Mapping[str, str], now: datetime, **asked: Any
) -> None:
    """Read what was typed and change the pace. Raises InvalidOption for what is no time."""
    pace, finish = (given.get(name, "").strip() for name in ("pace_per_second", "finish_by"))
    try:
        # The field is labelled UTC.
        finish_by = datetime.fromisoformat(finish).replace(tzinfo=UTC) if finish else None
    except ValueError:
        raise services.InvalidOption(f"{finish!r} is no date and time.") from None
    services.set_pace(
        move,
        pace_per_second=_number(pace) if pace else None,
        finish_by=finish_by,
        now=now,
        **asked,
    )


def _number(text: str) -> float:
    """Return the number in a field; 0, which no service takes, where there is none."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _at_once(
    request: HttpRequest, pk: int, panel: str, call: Callable[[Seen], Any]
) -> HttpResponse:
    """Carry out an act without a dialog and draw its panel afresh; a refusal inside it."""
    seen = read_seen(pk)
    try:
        call(seen)
    except Refused as refusal:
        if not request.htmx:
            return _page(request, read_seen(pk), refused=nothing_changed(refusal))
        return _panel(request, pk, panel, refused=nothing_changed(refusal))
    if not request.htmx:
        return redirect("move", pk=pk)
    response = _panel(request, pk, panel)
    response.headers["HX-Trigger"] = "moved"
    return response


@require_POST
@access(Role.OPERATOR)
def resume(request: HttpRequest, pk: int) -> HttpResponse:
    """Let a paused move go on."""

    def call(seen: Seen) -> None:
        by = request.user.get_username()
        services.resume(seen.move, by=by, seen=request.POST.get("seen"), now=database_now())

    return _at_once(request, pk, "head", call)


# --- mismatches ---------------------------------------------------------


def _chosen(request: HttpRequest, seen: Seen) -> list[int]:
    """Return the rows that the table's form means."""
    return mismatch_panel.chosen(seen, request.POST, request.POST.getlist("mismatch"))


def _repair(request: HttpRequest, pk: int, verb: Callable[..., Any]) -> HttpResponse:
    def call(seen: Seen) -> None:
        verb(
            seen.move,
            mismatch_ids=_chosen(request, seen),
            by=request.user.get_username(),
            seen=request.POST.get("seen"),
            now=database_now(),
        )

    return _at_once(request, pk, "mismatches", call)


@require_POST
@access(Role.OPERATOR)
def recopy(request: HttpRequest, pk: int) -> HttpResponse:
    """Repair the chosen mismatches, or all of them."""
    return _repair(request, pk, services.recopy)


@require_POST
@access(Role.OPERATOR)
def reconcile_users(request: HttpRequest, pk: int) -> HttpResponse:
    """Write the shared state of the chosen rows' users by value again."""
    return _repair(request, pk, services.reconcile_users)


@require_POST
@access(Role.OPERATOR)
def accept(request: HttpRequest, pk: int) -> HttpResponse:
    """Let the chosen differences stay; asks for the reason first, when none came along."""
    seen, refused = read_seen(pk), ""
    chosen = _chosen(request, seen)
    if "reason" in request.POST:
        try:
            services.accept(
                seen.move,
                mismatch_ids=chosen,
                by=request.user.get_username(),
                reason=request.POST["reason"].strip(),
                seen=request.POST.get("seen"),
                now=database_now(),
            )
        except Refused as refusal:
            refused, seen = nothing_changed(refusal), read_seen(pk)
        else:
            return _done(request, seen.move, "accept")
    found = list(seen.move.mismatches.filter(pk__in=chosen, resolved_at=None, accepted_at=None))
    if request.POST.get("all"):
        # Of all that the table shows, those that may stay; what was ticked is asked as it is.
        found = [row for row in found if queries.acceptable(seen.move, row)]
    if not found and not refused:
        refused = "Tick the rows that may stay first. Nothing was changed."
    dialog = dialogs.accept_dialog(seen, found)
    return show_dialog(request, seen, dialog, refused, database_now(), [row.pk for row in found])


@require_safe
@access(Role.OPERATOR)
def mismatch(request: HttpRequest, pk: int, mismatch_pk: int) -> HttpResponse:
    """Both sides of one mismatch. Values may be secrets, so viewers don't see them."""
    now, (seen, row) = database_now(), _mismatch(pk, mismatch_pk)
    diff, refused = _diff(seen.move, row, request.GET.get("page"))
    if diff is not None:
        by = request.user.get_username()
        services.note_values_read(seen.move, f"mismatch {row.pk}", by=by, now=now)
    context = {
        "now": now,
        "seen": seen,
        "move": seen.move,
        "line": mismatch_panel.mismatch_line(seen, row),
        "diff": diff,
        "refused": refused,
    }
    return render(request, "migrations_app/mismatch.html", context)


def _mismatch(pk: int, mismatch_pk: int) -> tuple[Seen, Mismatch]:
    seen = read_seen(pk)
    row = seen.move.mismatches.filter(pk=mismatch_pk).first()
    if row is None:
        raise Http404(f"{seen.move} has no mismatch {mismatch_pk}.")
    return seen, row


def _diff(
    move: TenantMigration, row: Mismatch, page: str | None
) -> tuple[diff_panel.Diff | None, str]:
    try:
        return diff_panel.diff(move, row, page=page), ""
    except Refused as refusal:
        return None, str(refusal)


@require_safe
@access(Role.OPERATOR)
def versions(request: HttpRequest, pk: int, mismatch_pk: int) -> HttpResponseBase:
    """Both versions of one mismatch, as a file."""
    seen, row = _mismatch(pk, mismatch_pk)
    name = f"{seen.move}-{row.pk}-both-versions.json"
    return _file(request, seen, [row], f"mismatch {row.pk}", name)


@require_safe
@access(Role.OPERATOR)
def late_versions(request: HttpRequest, pk: int) -> HttpResponseBase:
    """Both versions of every late write, in one file."""
    seen = read_seen(pk)
    late = queries.late_writes(seen.move).iterator(chunk_size=100)
    return _file(request, seen, late, "late writes", f"{seen.move}-late-writes.json")


def _file(
    request: HttpRequest, seen: Seen, found: Iterable[Mismatch], what: str, name: str
) -> HttpResponseBase:
    now = database_now()
    try:
        pieces = diff_panel.versions(seen.move, found, now=now)
    except Refused as refusal:
        return _page(request, seen, refused=str(refusal))
    by = request.user.get_username()
    services.note_values_read(seen.move, f"{what}, as a file", by=by, now=now)
    return StreamingHttpResponse(
        pieces,
        content_type="application/json",
        headers={
            "Content-Disposition": f'attachment; filename="{name}"',
            "Cache-Control": "no-store",
        },
    )


# --- lists ---------------------------------------------------------


@require_safe
@access(Role.VIEWER)
def moves(request: HttpRequest) -> HttpResponse:
    """Every move: live ones, ended ones, or all."""
    return _moves(request, "migrations_app/moves.html")


@require_safe
@access(Role.VIEWER)
def moves_table(request: HttpRequest) -> HttpResponse:
    """The list without its page."""
    return _moves(request, "migrations_app/_moves_table.html")


def _moves(request: HttpRequest, template: str) -> HttpResponse:
    now = database_now()
    state = request.GET.get("state", "live")
    wanted = MovesFilter(
        state=state if state in ("live", "ended", "all") else "live",
        text=request.GET.get("q", "").strip()[:100],
        page=page_number(request),
    )
    found = lists.moves_page(wanted, now=now)
    context = {
        "now": now,
        "found": found,
        "shown": counted(found.page.paginator.count, "move"),
        "query": urlencode({"state": wanted.state, "q": wanted.text, "page": wanted.page}),
        "every": None if wanted.state == "ended" else 2,
    }
    return render(request, template, context)


@require_safe
@access(Role.VIEWER)
def live_moves(request: HttpRequest) -> HttpResponse:
    """Moves in progress, worst first."""
    return render(request, "migrations_app/_live_moves.html", live_moves_context(database_now()))


def live_moves_context(now: datetime) -> dict[str, Any]:
    """Return what `_live_moves.html` draws."""
    return {"now": now, "lines": lists.live_moves(now=now)}


@require_safe
@access(Role.VIEWER)
def tenant_moves(request: HttpRequest, slug: str) -> HttpResponse:
    """The moves of one tenant."""
    tenant = Tenant.objects.filter(slug=slug).first()
    if tenant is None:
        raise Http404(f"There is no tenant {slug}.")
    context = tenant_moves_context(tenant, database_now())
    return render(request, "migrations_app/_tenant_moves.html", context)


def tenant_moves_context(tenant: Tenant, now: datetime) -> dict[str, Any]:
    """Return what `_tenant_moves.html` draws."""
    lines = lists.moves_of(tenant, now=now)
    live = next((line for line in lines if line.move.ended_at is None), None)
    return {
        "now": now,
        "tenant": tenant,
        "move_lines": lines,
        "live_move": live.move if live else None,
        "live_status": live.status if live else None,
    }


# --- a new move ---------------------------------------------------------


class NewMove(forms.Form):
    """What an operator chooses. Ranges are checked by the service, which says why."""

    target_cell = forms.ModelChoiceField(Cell.objects.all(), to_field_name="slug")
    target_store = forms.ModelChoiceField(Store.objects.all(), to_field_name="key")
    # The cell alone is what a move to the tenant's own store is: nobody chooses that mode here.
    mode = forms.ChoiceField(
        choices=[(mode, mode) for mode in (Mode.FENCE, Mode.SPLIT)], initial=Mode.FENCE
    )
    idle_minutes = forms.FloatField(initial=10, required=False)
    idle_bound_hours = forms.FloatField(initial=4, required=False)
    start_fence = forms.ChoiceField(choices=[("operator", ""), ("fits", "")], initial="operator")
    fence_not_before = forms.DateTimeField(required=False)
    budget_seconds = forms.FloatField(initial=150)
    drain_bound_seconds = forms.FloatField(initial=60)
    soak_hours = forms.FloatField(initial=72)
    # At most one of these three; the service says so.
    pace_per_second = forms.FloatField(required=False)
    finish_by = forms.DateTimeField(required=False)
    rows_per_second = forms.FloatField(required=False)
    flip_by_hand = forms.BooleanField(required=False)
    pause_before = forms.CharField(required=False, max_length=20)
    offboard = forms.ChoiceField(choices=[("confirm", ""), ("automatic", "")], initial="confirm")
    reason = forms.CharField(
        max_length=500,
        error_messages={"required": "Say why, in a sentence: whoever reads the log needs it."},
    )

    def options(self) -> dict[str, Any]:
        """Return what is told and started alike: all but tenant, cell, store, who and why."""
        given = self.cleaned_data
        # The times of a split's wait; a move by fence has no field for them.
        idle, bound = given["idle_minutes"], given["idle_bound_hours"]
        return {
            "mode": Mode(given["mode"]),
            "idle_seconds": 600.0 if idle is None else idle * 60,
            "idle_bound_seconds": 4 * 3600.0 if bound is None else bound * 3600,
            "automatic": given["start_fence"] == "fits",
            "fence_not_before": given["fence_not_before"],
            "budget_seconds": given["budget_seconds"],
            "drain_bound_seconds": given["drain_bound_seconds"],
            "soak_seconds": given["soak_hours"] * 3600,
            "pace_per_second": given["pace_per_second"],
            "finish_by": given["finish_by"],
            "rows_per_second": given["rows_per_second"],
            "flip_by_hand": given["flip_by_hand"],
            "pause_before": given["pause_before"],
            "offboard_automatically": given["offboard"] == "automatic",
        }


@require_http_methods(["GET", "HEAD", "POST"])
@access(Role.OPERATOR)
def new_move(request: HttpRequest) -> HttpResponse:
    """Choose a tenant, then where it goes; be told what would happen, then start."""
    given = request.POST if request.method == "POST" else request.GET
    slug = given.get("tenant", "").strip()
    context: dict[str, Any] = {"now": database_now(), "slug": slug}
    page = tenants_panels.tenant_page(slug) if slug else None
    if page is None:
        context["unknown"] = bool(slug)
        status = 409 if slug and request.method == "POST" else 200
        return _new_move_page(request, context, status)
    form = NewMove(request.POST) if request.method == "POST" else NewMove(initial=_from(request))
    context |= {
        "page": page,
        "tenant": page.tenant,
        "form": form,
        "given": _given(form),
        "live_move": lists.live_move_of([page.tenant]).get(page.tenant.pk),
        "targets": lists.targets(page.placement, own_store=True),
        "rehearsed": page.tenant.rehearsals.select_related("target_store")[:3],
        # A move by fence has all but the split; which one fits is the service's to say.
        "phases": pausable_before(Mode.SPLIT),
        "longest_tool": tenants_panels.longest_tool_seconds(
            page.placement.cell, now=context["now"]
        ),
    }
    if request.method != "POST":
        return _new_move_page(request, context)
    telling = request.POST.get("act") != "start"
    # A reason may still be missing while nothing is started.
    form.fields["reason"].required = not telling
    if not form.is_valid():
        return _new_move_page(request, context, 409)
    places = {name: form.cleaned_data[name] for name in ("target_cell", "target_store")}
    try:
        if telling:
            told = dry_run(page.tenant, **places, now=database_now(), **form.options())
            return _new_move_page(request, context | {"told": told, "found": told.checks})
        started = services.start(
            page.tenant,
            **places,
            by=request.user.get_username(),
            reason=form.cleaned_data["reason"],
            now=database_now(),
            **paced(page.tenant, **form.options()),
        )
    except Refused as refusal:
        return _new_move_page(request, context | {"refused": nothing_changed(refusal)}, 409)
    if request.htmx:
        url = reverse("move", args=[started.pk])
        return HttpResponse(status=204, headers={"HX-Redirect": url})
    return redirect("move", pk=started.pk)


def _new_move_page(
    request: HttpRequest, context: dict[str, Any], status: int = 200
) -> HttpResponse:
    name = "_new_move_form" if request.htmx else "new_move"
    response = render(request, f"migrations_app/{name}.html", context, status=status)
    return by_request_kind(response)


def _from(request: HttpRequest) -> dict[str, str]:
    """Return what a link proposes, such as a cell from a plan."""
    names = ("target_cell", "target_store", "reason")
    return {name: request.GET[name][:500] for name in names if name in request.GET}


def _given(form: NewMove) -> dict[str, Any]:
    """Return each field's value as it was typed, or its default, as text."""
    values = {name: form[name].value() for name in form.fields}
    return {
        name: f"{value:g}" if isinstance(value, int | float) else value or ""
        for name, value in values.items()
    }


# --- after our own database was restored ---------------------------------------------------------


# Tenants that the page lists at once, each with its form.
FINDINGS_SHOWN = 50


@require_safe
@access(Role.VIEWER)
def restored_page(request: HttpRequest) -> HttpResponse:
    """Why all machines are stopped, and the tenants that nobody has settled."""
    return _restored_page(request)


@require_POST
@access(Role.ADMIN)
def settle(request: HttpRequest, slug: str) -> HttpResponse:
    """Say where a tenant lives."""

    def say(by: str, reason: str, now: datetime) -> None:
        cell = request.POST.get("cell", "")
        restored.settle(
            _finding(slug),
            home=_named(Store.objects.filter(key=request.POST.get("store", ""))),
            cell=_named(Cell.objects.filter(slug=cell)) if cell else None,
            by=by,
            reason=reason,
            now=now,
        )

    return _restored_act(request, say)


@require_POST
@access(Role.ADMIN)
def leave_refused(request: HttpRequest, slug: str) -> HttpResponse:
    """Go on without a tenant of which nobody can say where it lives."""
    return _restored_act(
        request,
        lambda by, reason, now: restored.leave_refused(
            _finding(slug), by=by, reason=reason, now=now
        ),
    )


@require_POST
@access(Role.ADMIN)
def start_machines(request: HttpRequest) -> HttpResponse:
    """Start the machines again."""
    return _restored_act(
        request, lambda by, reason, now: restored.start_machines(by=by, reason=reason, now=now)
    )


def _restored_act(request: HttpRequest, act: Callable[[str, str, datetime], None]) -> HttpResponse:
    reason = request.POST.get("reason", "").replace("\0", "")[: services.REASON_CHARACTERS]
    try:
        act(request.user.get_username(), reason, database_now())
    except Refused as refusal:
        return _restored_page(request, refused=nothing_changed(refusal), status=409)
    return redirect("restored")


def _restored_page(request: HttpRequest, *, refused: str = "", status: int = 200) -> HttpResponse:
    page = Paginator(restored.open_findings(), FINDINGS_SHOWN).get_page(request.GET.get("page"))
    context = {
        "now": database_now(),
        "halt": tenants_queries.halt(),
        "page": page,
        "cells": tenants_panels.choices().cells,
        "may_settle": request.role is Role.ADMIN,
        "refused": refused,
    }
    return render(request, "migrations_app/restored.html", context, status=status)


def _finding(slug: str) -> RestoreFinding:
    return _named(restored.open_findings().filter(tenant__slug=slug))


def _named(rows: QuerySet[Any]) -> Any:
    found = rows.first()
    if found is None:
        raise Http404("There is no such row any more.")
    return found

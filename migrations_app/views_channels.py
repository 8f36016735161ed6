"""Pages of side channels: which there are, who does their steps, and a person's word in a move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django import forms
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.http import urlencode
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from durable.clock import database_now
from durable.errors import Refused
from migrations_app import channels, queries
from migrations_app.domain.channels import Step, StepBy
from migrations_app.models import MoveChannel, SideChannel
from migrations_app.panels import channels as channels_panel
from migrations_app.preflight import may_call
from migrations_app.services import REASON_CHARACTERS
from migrations_app.views import read_seen, show_dialog
from tenants.domain.roles import Role
from tenants.models import Agent, Tenant
from tenants.views import access, nothing_changed

CHANNEL_ROWS = 50


# --- in a move ---------------------------------------------------------------------------------


@require_http_methods(["GET", "HEAD", "POST"])
@access(Role.OPERATOR)
def check_channel(request: HttpRequest, pk: int, row: int, step: str) -> HttpResponse:
    """Say that a step is done, and how; or take that back."""
    seen = read_seen(pk)
    if step not in list(Step):
        raise Http404(f"There is no step {step[:40]}.")
    found = _row(seen.move.pk, row)
    undo = request.GET.get("undo") == "1"
    refused, now = "", database_now()
    if request.method == "POST":
        verb = channels.uncheck if undo else channels.check_off
        try:
            verb(
                found,
                step=step,
                note=request.POST.get("reason", "").strip(),
                by=request.user.get_username(),
                now=now,
                seen=request.POST.get("seen"),
            )
        except Refused as refusal:
            refused, seen = nothing_changed(refusal), read_seen(pk)
            found = _row(seen.move.pk, row)
        else:
            return _checked(request, pk, found, step, undo)
    dialog = channels_panel.check_dialog(seen, found, Step(step), undo=undo, now=now)
    return show_dialog(request, seen, dialog, refused, now)


def _row(move: int, pk: int) -> MoveChannel:
    row = MoveChannel.objects.filter(pk=pk, move=move).select_related("channel", "move").first()
    if row is None:
        raise Http404(f"mv-{move} has no side channel {pk}.")
    return row


def _checked(
    request: HttpRequest, pk: int, row: MoveChannel, step: str, undo: bool
) -> HttpResponse:
    if not request.htmx:
        return redirect(f"{reverse('move', args=[pk])}#move-channels")
    done = "taken back" if undo else "checked off"
    text = f"{row.channel}: {step} {done}."
    response = render(request, "migrations_app/_done.html", {"text": text})
    response.headers["HX-Trigger"] = "moved"
    return response


# --- which there are ---------------------------------------------------------------------------


@require_safe
@access(Role.VIEWER)
def side_channels(request: HttpRequest) -> HttpResponse:
    """The side channels of a tenant and its agent, of an agent, or all."""
    owner = _owner(request)
    rows = SideChannel.objects.filter(removed_at=None).select_related("agent", "tenant")
    if owner.tenant is not None:
        ours = queries.channels_of(owner.tenant)
        rows = rows.filter(pk__in=ours.values("pk"))
    elif owner.agent is not None:
        rows = rows.filter(agent=owner.agent)
    page = Paginator(rows, CHANNEL_ROWS).get_page(request.GET.get("page"))
    context = {
        "owner": owner,
        "page": page,
        "lines": [channels_panel.registered(row) for row in page],
        "may_register": request.role is Role.ADMIN,
        "allowed": may_call(),
    }
    return render(request, "migrations_app/side_channels.html", context)


def tenant_channels_context(tenant: Tenant) -> dict[str, Any]:
    """Return what `_tenant_channels.html` draws."""
    rows = queries.channels_of(tenant).select_related("agent", "tenant")[:CHANNEL_ROWS]
    return {"tenant": tenant, "channel_lines": [channels_panel.registered(row) for row in rows]}


class _Owner:
    """Whose channels a page is about: a tenant's, an agent's, or everybody's."""

    def __init__(self, tenant: Tenant | None, agent: Agent | None) -> None:
        self.tenant, self.agent = tenant, agent

    @property
    def words(self) -> str:
        if self.tenant is not None:
            return f"tenant {self.tenant}"
        return f"agent {self.agent}" if self.agent is not None else "everybody"

    @property
    def query(self) -> str:
        if self.tenant is not None:
            return urlencode({"tenant": self.tenant.slug})
        return urlencode({"agent": self.agent.slug}) if self.agent is not None else ""


def _owner(request: HttpRequest) -> _Owner:
    """Read whose from the address or the form; raise Http404 for an unknown one."""
    given = request.POST if request.method == "POST" else request.GET
    tenant, agent = given.get("tenant", "").strip(), given.get("agent", "").strip()
    if tenant:
        return _Owner(_named(Tenant, "tenant", tenant), None)
    return _Owner(None, _named(Agent, "agent", agent) if agent else None)


def _named(model: Any, what: str, slug: str) -> Any:
    found = None if "\0" in slug else model.objects.filter(slug=slug).first()
    if found is None:
        raise Http404(f"There is no {what} {slug[:60]!r}.")
    return found


class ChannelForm(forms.Form):
    """A side channel as it is typed. What may be a step is checked by the service."""

    name = forms.CharField(max_length=100, error_messages={"required": "Give it a name."})
    about = forms.CharField(required=False, max_length=2_000)
    required = forms.BooleanField(required=False)
    copy_by = forms.ChoiceField(choices=[(by, by) for by in StepBy], initial=StepBy.PERSON)
    copy_step = forms.CharField(required=False, max_length=1_000)
    verify_by = forms.ChoiceField(choices=[(by, by) for by in StepBy], initial=StepBy.PERSON)
    verify_step = forms.CharField(required=False, max_length=1_000)
    reason = forms.CharField(
        max_length=500,
        error_messages={"required": "Say why, in a sentence: whoever reads the log needs it."},
    )


@require_http_methods(["GET", "HEAD", "POST"])
@access(Role.ADMIN)
def new_channel(request: HttpRequest) -> HttpResponse:
    """Register a side channel of a tenant, or of an agent."""
    owner = _owner(request)

    def save(values: dict[str, Any], by: str) -> None:
        channels.register(
            tenant=owner.tenant, agent=owner.agent, **values, by=by, now=database_now()
        )

    form = ChannelForm(request.POST or None, initial={"required": True})
    return _form_page(request, form, save, owner, None)


@require_http_methods(["GET", "HEAD", "POST"])
@access(Role.ADMIN)
def edit_channel(request: HttpRequest, channel: int) -> HttpResponse:
    """Change what a side channel is, or how its steps are done."""
    row = _channel(channel)

    def save(values: dict[str, Any], by: str) -> None:
        channels.edit(row, by=by, now=database_now(), **values)

    initial = {name: getattr(row, name) for name in channels.EDITABLE}
    form = ChannelForm(request.POST or None, initial=initial)
    return _form_page(request, form, save, _Owner(row.tenant, row.agent), row)


@require_POST
@access(Role.ADMIN)
def remove_channel(request: HttpRequest, channel: int) -> HttpResponse:
    """Take a side channel off the list of moves."""
    row = _channel(channel)
    owner = _Owner(row.tenant, row.agent)
    reason = request.POST.get("reason", "").replace("\0", "").strip()[:REASON_CHARACTERS]
    try:
        by = request.user.get_username()
        channels.remove(row, by=by, reason=reason, now=database_now())
    except Refused as refusal:
        initial = {name: getattr(row, name) for name in channels.EDITABLE}
        return _form(request, ChannelForm(initial=initial), owner, row, nothing_changed(refusal))
    return _listed(owner)


def _channel(pk: int) -> SideChannel:
    rows = SideChannel.objects.filter(removed_at=None).select_related("tenant", "agent")
    row = rows.filter(pk=pk).first()
    if row is None:
        raise Http404(f"There is no side channel {pk}.")
    return row


def _form_page(
    request: HttpRequest,
    form: ChannelForm,
    save: Callable[[dict[str, Any], str], None],
    owner: _Owner,
    row: SideChannel | None,
) -> HttpResponse:
    if request.method != "POST":
        return _form(request, form, owner, row, "")
    if not form.is_valid():
        return _form(request, form, owner, row, "", status=409)
    try:
        save(form.cleaned_data, request.user.get_username())
    except Refused as refusal:
        return _form(request, form, owner, row, nothing_changed(refusal))
    return _listed(owner)


def _listed(owner: _Owner) -> HttpResponse:
    query = f"?{owner.query}" if owner.query else ""
    return redirect(f"{reverse('side_channels')}{query}")


def _form(
    request: HttpRequest,
    form: ChannelForm,
    owner: _Owner,
    row: SideChannel | None,
    refused: str,
    *,
    status: int | None = None,
) -> HttpResponse:
    context = {
        "form": form,
        "given": {name: form[name].value() for name in form.fields},
        "errors": {name: errors[0] for name, errors in form.errors.items()},
        "owner": owner,
        "row": row,
        "by_choices": (
            (StepBy.PERSON, "A person checks it off"),
            (StepBy.CALLABLE, "A callable of this installation"),
            (StepBy.COMMAND, "A command of this installation"),
        ),
        "allowed": may_call(),
        "refused": refused,
    }
    code = status or (409 if refused else 200)
    return render(request, "migrations_app/channel_form.html", context, status=code)

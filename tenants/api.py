"""The wire: what runtimes, gateways and operators' programs ask of this app.

Field names here are the contract; the OpenAPI document is made from this file. Unknown fields of
runtimes and gateways are ignored, so that an old control plane takes a newer client. Operators'
verbs refuse them: there a field that nobody knows is one that was mistyped.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Generic, Literal, TypeVar, cast

from django.contrib.auth.models import User
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse
from ninja import Router, Schema, Status
from pydantic import AfterValidator, AwareDatetime, BeforeValidator, ConfigDict, Field

from durable.clock import database_now
from durable.errors import Refused
from tenants import queries, services
from tenants.domain.fence import cadence_ms
from tenants.domain.reports import (
    COUNT_MAX,
    MAX_REASONS,
    NUMBER_MAX,
    Dirty,
    Report,
    Usage,
    clean_breakers,
    clean_counts,
    clean_number,
    clean_ready,
    clean_runners,
    storable,
)
from tenants.domain.roles import Actor, Role, TokenRole, allows
from tenants.domain.versions import Version
from tenants.models import (
    Cell,
    Membership,
    Region,
    RuntimeInstance,
    Store,
    Tenant,
    Token,
)

runtime_router = Router(tags=["runtime"])
placement_router = Router(tags=["gateway"])
ops_router = Router(tags=["operators"])

# Bounds of one report. What a client holds beyond them goes into its next one.
MAX_TENANTS, MAX_USAGE, MAX_DIRTY = 20_000, 5_000, 10_000
PAGE = 500

Row = TypeVar("Row", bound=Model)
T = TypeVar("T")


class NotFound(Refused):
    """There is no such row."""

    status = 404


class Forbidden(Refused):
    """The caller's role does not allow this."""

    status = 403


def require(request: HttpRequest, needed: Role) -> Actor:
    """Return who asks. Raises Forbidden unless their role has the rights of `needed`."""
    actor = cast(Actor, request.auth)  # type: ignore[attr-defined]
    if not allows(actor.role, needed):
        raise Forbidden(
            f"This needs the role {needed}; {actor.name} is {actor.role}. Ask an admin for it."
        )
    return actor


def _storable_keys(value: Any) -> Any:
    """Return the mapping without the keys that the database could not hold; no tenant has one."""
    if not isinstance(value, dict):
        return value
    return {key: count for key, count in value.items() if storable(key) is not None}


def _utc(value: datetime) -> datetime:
    """Return the moment in UTC. Raises ValueError at the ends of the calendar."""
    try:
        return value.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("there is no such moment in UTC") from error


# No NUL: PostgreSQL can't hold one, neither in text nor in JSON.
Text = Annotated[str, Field(max_length=100, pattern=r"^[^\x00]*$")]
Reason = Annotated[str, Field(max_length=2_000, pattern=r"^[^\x00]*$")]
Slug = Annotated[str, Field(min_length=1, max_length=60, pattern=r"^[a-z0-9][a-z0-9_-]*$")]
Count = Annotated[int, Field(ge=0, le=COUNT_MAX)]
Moment = Annotated[AwareDatetime, AfterValidator(_utc)]
Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
# Whoever begins a turn may choose ids that we can't keep. They must not cost the whole report,
# and with it the lease: such a line is left out.
Id = Annotated[str | None, BeforeValidator(storable)]
Running = Annotated[
    dict[str, Count], Field(max_length=MAX_TENANTS), BeforeValidator(_storable_keys)
]


class Error(Schema):
    """Every answer that is not a success."""

    # A word for programs, such as "cell_is_full".
    error: str
    # A sentence for people: what, why, and what to do.
    detail: str
    # Null: asking again does not help before somebody changes something.
    retry_after_seconds: float | None


# --- runtimes -------------------------------------------------------------------------------


class JoinIn(Schema):
    cell: Slug
    name: Annotated[Text, Field(min_length=1)]
    build: Text = ""
    # Random per process: tells a restart, or a forked child, from a repeated join.
    boot: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00]*$")]
    # Past it the instance itself cuts a turn; a lapsed lease counts that much longer.
    longest_turn_seconds: Seconds
    longest_tool_seconds: Seconds = 0.0
    plugins: Annotated[list[Text], Field(max_length=100)] = []
    # Keys of the stores that it could open.
    stores: Annotated[list[Text], Field(max_length=1_000)] = []
    # The id that this same process had, if it joins anew.
    replaces: Text | None = None
    # The policy that this same process held last; empty: none yet. One above the cell's counter
    # tells that the control plane's database is older than its runtimes.
    applied_version: Text = ""


class JoinOut(Schema):
    instance: str
    lease_seconds: float
    poll_after_ms: int
    epoch: str


class StoreOut(Schema):
    key: str
    kind: str


class LimitsOut(Schema):
    version: int
    # Null on a limit: no limit.
    max_concurrent_runs: int | None
    runs_per_second: float | None
    daily_token_budget: int | None
    max_model_calls_per_run: int | None
    allowed_tools: list[str] | None
    # True: what is left of the budget is looked at before every model call.
    exact_budget: bool
    weight: float


class ScopeOut(LimitsOut):
    # Turns are refused until then, for today's budget is used up (UTC). Null, or past: it is not.
    budget_spent_until: str | None


class SideOut(Schema):
    cell: str
    store: str


class SidesOut(Schema):
    # Asked first: serves the sessions that its store has.
    existing: SideOut
    # Serves what the first has said it does not know.
    new: SideOut


class EntryOut(Schema):
    tenant: str
    agent: str
    app_name: str
    tier: str
    placement_version: str
    accepts: Literal["all", "none", "existing", "new", "moved"]
    # The cell that a tombstone names.
    moved_to: str | None
    # The cell that owns the tenant, where this one does not: only announced here, or the far side
    # of a split. Null: this cell does, or the entry is a tombstone.
    home_cell: str | None
    # True: this cell is the home of a tenant that is split, so a session that its store does not
    # have may be the far side's.
    split: bool
    # Null: not split.
    sides: SidesOut | None
    store: StoreOut
    runner_generation: int
    scope: ScopeOut
    # Limits that are only tried: what they would refuse is counted as would_refuse, and served.
    trial: ScopeOut | None


class PolicyOut(Schema):
    version: str
    # True: the entries replace everything that the instance holds.
    full: bool
    poll_after_ms: int
    # Null: unchanged.
    cell: dict[str, Any] | None
    tenants: list[EntryOut]


class UsageIn(Schema):
    tenant: Id
    minute: Moment
    turns: Count = 0
    model_calls: Count = 0
    tokens: Annotated[int, Field(ge=0, le=10**12)] = 0
    refused: Annotated[dict[Text, Count], Field(max_length=MAX_REASONS)] = {}
    # By a trial's limits; these turns were served.
    would_refuse: Annotated[dict[str, int], BeforeValidator(clean_counts)] = {}


class DirtyIn(Schema):
    tenant: Id
    user_id: Id = None
    session_id: Id = None


class EvictedIn(Schema):
    size: int = 0
    idle: int = 0
    generation: int = 0
    # Its tenant moved away or was offboarded.
    gone: int = 0


class BuildMsIn(Schema):
    # Null: nothing was built yet.
    p50: float | None = None
    p99: float | None = None


class RunnersIn(Schema):
    """The cache of Runners. Counts are of the process's whole life."""

    size: int = 0
    limit: int = 0
    idle_seconds: float = 0.0
    evicted: EvictedIn = EvictedIn()
    builds: int = 0
    build_ms: BuildMsIn = BuildMsIn()
    # Of one Runner on the heap. Null: not measured.
    bytes: int | None = None


class BreakerIn(Schema):
    state: Literal["closed", "open", "half_open"]
    failures: int = 0
    # Answers 429, told apart: our own quota is used up, or a shared pool is busy.
    own_quota_429: int = 0
    shared_pool_429: int = 0
    # Null: it lets calls through.
    retry_at: str | None = None


class ReportIn(Schema):
    instance: Text
    boot: Text
    # Counts from 1; the next is exactly one more, a retry sends the same bytes.
    seq: Annotated[int, Field(ge=1, le=2**53)]
    # Empty while no policy is held.
    applied_version: Text = ""
    # Read together with applied_version, under the lock that admission takes. Absent: 0.
    in_flight: Running = {}
    in_flight_older: Running = {}
    usage: Annotated[list[UsageIn], Field(max_length=MAX_USAGE)] = []
    dirty: Annotated[list[DirtyIn], Field(max_length=MAX_DIRTY)] = []
    # What follows is not worth a report: a value that makes no sense counts as left out.
    # The number of the last grants that are applied; read before in_flight.
    grants_number: Annotated[int, BeforeValidator(clean_number), Field(ge=0, le=NUMBER_MAX)] = 0
    # Whether Runners are built ahead, so that gateways may send turns.
    ready: Annotated[bool, BeforeValidator(clean_ready)] = True
    runners: Annotated[RunnersIn | None, BeforeValidator(clean_runners)] = None
    # By model endpoint.
    breakers: Annotated[dict[str, BreakerIn], BeforeValidator(clean_breakers)] = {}


class InstanceShareOut(Schema):
    """What one instance may use of one tenant's limits. Null: that limit does not exist."""

    runs_per_second: float | None
    max_concurrent_runs: int | None
    tokens_per_minute: float | None
    # From the end of grant_seconds until the lease is over.
    safe_runs_per_second: float | None
    safe_max_concurrent_runs: int | None
    safe_tokens_per_minute: float | None
    # Of the tenant's daily budget, over all instances, when the grants were made.
    tokens_left: int | None


class GrantsOut(Schema):
    number: int
    # Replaces every share that is held. A tenant with a limit and without a share: 0.
    tenants: dict[str, InstanceShareOut]


class ReportOut(Schema):
    # From now on; the client counts it from the moment it sent the report.
    lease_seconds: float
    # Null: what is held stands.
    grants: GrantsOut | None
    # How long shares may be used in full; counted from when the report was sent, first sent if
    # it was retried.
    grant_seconds: float
    poll_after_ms: int
    version: str


@runtime_router.post("/instances", response={200: JoinOut, 403: Error, 409: Error})
def join(request: HttpRequest, body: JoinIn) -> dict[str, Any]:
    """Join a cell as a new instance. It serves nothing before its first full policy."""
    cells = {cell.slug: cell for cell in _token(request).cells.all()}
    if body.cell not in cells:
        # Whether there is such a cell is nobody's business who may not serve it.
        raise services.NotYourCell(
            f"This token is not for a cell {body.cell}. Use that cell's token."
        )
    now = database_now()
    # Read afresh: the token's row, and its cells with it, may be a second old.
    cell = Cell.objects.get(pk=cells[body.cell].pk)
    row = services.join(
        cell,
        name=body.name,
        build=body.build,
        boot=body.boot,
        longest_turn_seconds=body.longest_turn_seconds,
        longest_tool_seconds=body.longest_tool_seconds,
        plugins=body.plugins,
        stores=body.stores,
        replaces=body.replaces or None,
        applied_version=body.applied_version,
        now=now,
    )
    return {
        "instance": row.key,
        "lease_seconds": (row.lease_until - now).total_seconds(),
        "poll_after_ms": cadence_ms(cell.fast_until, now),
        "epoch": queries.epoch(),
    }


@runtime_router.get(
    "/policy",
    response={200: PolicyOut, 304: None, 403: Error, 409: Error, 410: Error},
    summary="Policy",
)
def policy(request: HttpRequest, instance: Text, since: str = "") -> HttpResponse:
    """Answer what changed in the instance's cell since version `since`; 304 if nothing did."""
    asking = services.poll(instance, since=since, cells=_cells(request), now=database_now())
    changed = queries.policy(asking, since=since)
    cadence = asking.instance.poll_after_ms
    if changed is None:
        return _versioned(None, asking.version, cadence)
    body = {
        "version": str(changed.version),
        "full": changed.full,
        "poll_after_ms": cadence,
        "cell": changed.cell,
        "tenants": changed.tenants,
    }
    return _versioned(body, changed.version, cadence)


@runtime_router.post("/reports", response={200: ReportOut, 403: Error, 409: Error, 410: Error})
def report(request: HttpRequest, body: ReportIn) -> HttpResponse:
    """Take one report. It renews the lease; 409 seq_gap and 410 instance_gone mean: join anew."""
    said = Report(
        instance=body.instance,
        boot=body.boot,
        seq=body.seq,
        applied_version=body.applied_version,
        in_flight=body.in_flight,
        in_flight_older=body.in_flight_older,
        usage=tuple(
            Usage(
                tenant=line.tenant,
                minute=line.minute,
                turns=line.turns,
                model_calls=line.model_calls,
                tokens=line.tokens,
                refused=line.refused,
                would_refuse=line.would_refuse,
            )
            for line in body.usage
            if line.tenant is not None
        ),
        dirty=tuple(
            Dirty(str(line.tenant), str(line.user_id), str(line.session_id))
            for line in body.dirty
            if None not in (line.tenant, line.user_id, line.session_id)
        ),
        grants_number=body.grants_number,
        ready=body.ready,
        runners={} if body.runners is None else body.runners.dict(),
        breakers={endpoint: breaker.dict() for endpoint, breaker in body.breakers.items()},
    )
    answer = services.report(said, cells=_cells(request), now=database_now())
    granted = answer.grants
    content = {
        "lease_seconds": answer.lease_seconds,
        "grants": None if granted is None else {"number": granted[0], "tenants": granted[1]},
        "grant_seconds": answer.grant_seconds,
        "poll_after_ms": answer.poll_after_ms,
        "version": str(answer.version),
    }
    return _answer(content, {})


@runtime_router.delete("/instances/{instance}", response={204: None, 403: Error, 410: Error})
def leave(request: HttpRequest, instance: Text) -> HttpResponse:
    """Leave, after the instance's own drain. May be said twice."""
    services.leave(instance, cells=_cells(request), now=database_now())
    return HttpResponse(status=204)


# --- gateways -------------------------------------------------------------------------------


class FeedSideOut(SideOut):
    cell_url: str


class FeedSidesOut(Schema):
    # The home. Each turn is offered to it first.
    existing: FeedSideOut
    # Where a turn goes, marked, to which the first has said "not here".
    new: FeedSideOut


class PlacementOut(Schema):
    tenant: str
    app_name: str
    cell: str
    cell_url: str
    store: str
    placement_version: str
    # Null: not split.
    sides: FeedSidesOut | None
    home_region: str
    fail_mode: Literal["closed", "open"]


class FeedOut(Schema):
    version: str
    # True: the rows replace everything that the gateway holds.
    full: bool
    tenants: list[PlacementOut]


@placement_router.get("", response={200: FeedOut, 304: None}, summary="Placement feed")
def placement(request: HttpRequest, since: str = "") -> HttpResponse:
    """Answer where tenants live, as far as it changed since version `since`; 304 if it did not."""
    feed = queries.placement_feed(since=since)
    if feed is None:
        # Nothing changed, so what the caller has is the version.
        return _answer(None, {"ETag": f'"{since}"'})
    body = {"version": str(feed.version), "full": feed.full, "tenants": feed.tenants}
    return _answer(body, {"ETag": f'"{feed.version}"'})


def _token(request: HttpRequest) -> Token:
    return cast(Token, request.auth)  # type: ignore[attr-defined]


def _cells(request: HttpRequest) -> frozenset[int]:
    return frozenset(cell.pk for cell in _token(request).cells.all())


def _versioned(body: dict[str, Any] | None, version: Version, cadence: int) -> HttpResponse:
    return _answer(body, {"ETag": f'"{version}"', "Poll-After-Ms": str(cadence)})


def _answer(body: dict[str, Any] | None, headers: dict[str, str]) -> HttpResponse:
    """Return JSON as it is, or 304: it is ours and was checked when it was published."""
    if body is None:
        return HttpResponse(status=304, headers=headers)
    content = json.dumps(body, separators=(",", ":"))
    return HttpResponse(content, content_type="application/json", headers=headers)


# --- operators ------------------------------------------------------------------------------


class OpsIn(Schema):
    """What an operator's verb takes: nothing beside it."""

    model_config = ConfigDict(extra="forbid")


class RegionIn(OpsIn):
    slug: str
    name: str


class RegionOut(Schema):
    slug: str
    name: str


class CellIn(OpsIn):
    slug: str
    region: Slug
    url: str = ""
    quota_tokens_per_minute: int | None = None


class QuotaIn(OpsIn):
    tokens_per_minute: int
    # Null, or left out: what is known of it stays. Whichever binds first bounds the cell.
    requests_per_minute: int | None = None


class UrlIn(OpsIn):
    url: str
    reason: Reason = ""


class CellOut(Schema):
    slug: str
    region: str
    url: str
    policy_version: str
    quota_tokens_per_minute: int | None
    # Null: nobody has entered it, so it binds nothing.
    quota_requests_per_minute: int | None
    # Null: the quota is only assumed, and no tenant may be placed here.
    quota_verified_at: datetime | None
    quota_verified_by: str
    # Null: nothing moves.
    fast_until: datetime | None


class OpsStoreIn(OpsIn):
    key: str
    region: Slug
    kind: str
    # "env:NAME" or "file:/path", never the address itself.
    address_from: str
    # The same, of google-adk's artifact and memory services beside the sessions. "": none.
    artifacts_from: str = ""
    memory_from: str = ""


class OpsStoreOut(Schema):
    key: str
    region: str
    kind: str
    address_from: str
    artifacts_from: str
    memory_from: str
    # Null: never surveyed.
    surveyed_at: datetime | None


class TenantIn(OpsIn):
    slug: str
    name: str
    app_name: str
    cell: Slug
    store: Slug
    time_zone: str = "UTC"
    weight: float = 1.0
    tier: str = "pooled"


class InternalIn(OpsIn):
    # True: ours, with no customer behind it, so that whole moves may be rehearsed on it.
    internal: bool
    reason: Reason


class TenantOut(Schema):
    slug: str
    name: str
    app_name: str
    agent: str
    time_zone: str
    weight: float
    tier: str
    internal: bool
    cell: str
    store: str
    placement_version: str
    # What its cell was last told: all, none, or in a split existing.
    accepts: str


class InstanceOut(Schema):
    instance: str
    name: str
    cell: str
    build: str
    stores: list[str]
    plugins: list[str]
    joined_at: datetime
    lease_until: datetime
    polled_at: datetime | None
    reported_at: datetime | None
    # Empty: nothing applied yet.
    applied_version: str
    in_flight: dict[str, int]
    # Null: alive as far as is known.
    gone_at: datetime | None
    gone_why: str
    # When somebody asked to declare it dead; a second person confirms within 30 minutes.
    dead_asked_at: datetime | None
    dead_asked_by: str
    dead_asked_why: str


class WhyIn(OpsIn):
    reason: Reason = ""


class TokenIn(OpsIn):
    name: str
    role: TokenRole
    cells: Annotated[list[Slug], Field(max_length=1_000)] = []
    tenant: Slug | None = None
    # For role operator: the signed-in user that makes it, and nobody else.
    expires_at: Moment


class TokenOut(Schema):
    id: int
    name: str
    prefix: str
    role: str
    cells: list[str]
    tenant: str | None
    user: str | None
    created_at: datetime
    created_by: str
    expires_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None


class NewTokenOut(TokenOut):
    # Shown this once, kept nowhere.
    secret: str


class MemberIn(OpsIn):
    # The name of a sign-in that there is. `manage.py member --new` makes one, with a password.
    name: Annotated[Text, Field(min_length=1)]


class MemberOut(Schema):
    name: str
    tenant: str
    at: datetime
    by: str


class PageOut(Schema, Generic[T]):
    items: list[T]
    # Give it as `after` for the rest. Null: that was all.
    next: str | None


@ops_router.get("/regions", response=PageOut[RegionOut])
def regions(request: HttpRequest, after: Text = "") -> dict[str, Any]:
    """List regions."""
    return page(Region.objects.all(), "slug", after, _region)


@ops_router.post("/regions", response={201: RegionOut, 403: Error, 409: Error})
def add_region(request: HttpRequest, body: RegionIn) -> Status[dict[str, Any]]:
    """Register a region (admin)."""
    by = require(request, Role.ADMIN).name
    return _made(_region(services.add_region(body.slug, name=body.name, by=by, now=database_now())))


@ops_router.get("/cells", response=PageOut[CellOut])
def cells(request: HttpRequest, after: Text = "") -> dict[str, Any]:
    """List cells."""
    return page(Cell.objects.select_related("region"), "slug", after, _cell)


@ops_router.post("/cells", response={201: CellOut, 403: Error, 404: Error, 409: Error})
def add_cell(request: HttpRequest, body: CellIn) -> Status[dict[str, Any]]:
    """Register a cell (admin). Its quota is only assumed until it has been verified."""
    cell = services.add_cell(
        body.slug,
        region=find(Region, "region", slug=body.region),
        url=body.url,
        quota_tokens_per_minute=body.quota_tokens_per_minute,
        by=require(request, Role.ADMIN).name,
        now=database_now(),
    )
    return _made(_cell(cell))


@ops_router.post("/cells/{slug:slug}/quota", response={200: CellOut, 403: Error, 404: Error})
def verify_quota(request: HttpRequest, slug: str, body: QuotaIn) -> dict[str, Any]:
    """Record a model quota that was looked up at the provider (admin)."""
    cell = services.verify_quota(
        find(Cell, "cell", slug=slug),
        tokens_per_minute=body.tokens_per_minute,
        requests_per_minute=body.requests_per_minute,
        by=require(request, Role.ADMIN).name,
        now=database_now(),
    )
    return _cell(cell)


@ops_router.post("/cells/{slug:slug}/url", response={200: CellOut, 403: Error, 404: Error})
def set_cell_url(request: HttpRequest, slug: str, body: UrlIn) -> dict[str, Any]:
    """Change where gateways forward the cell's turns to (admin)."""
    cell = services.set_cell_url(
        find(Cell, "cell", slug=slug),
        url=body.url,
        by=require(request, Role.ADMIN).name,
        reason=body.reason,
        now=database_now(),
    )
    return _cell(cell)


@ops_router.get("/stores", response=PageOut[OpsStoreOut])
def stores(request: HttpRequest, after: Text = "") -> dict[str, Any]:
    """List stores. Their addresses are references; the addresses themselves are nowhere here."""
    return page(Store.objects.select_related("region"), "key", after, store_out)


@ops_router.post("/stores", response={201: OpsStoreOut, 403: Error, 404: Error, 409: Error})
def add_store(request: HttpRequest, body: OpsStoreIn) -> Status[dict[str, Any]]:
    """Register a store by reference (admin)."""
    store = services.add_store(
        body.key,
        region=find(Region, "region", slug=body.region),
        kind=body.kind,
        address_from=body.address_from,
        artifacts_from=body.artifacts_from,
        memory_from=body.memory_from,
        by=require(request, Role.ADMIN).name,
        now=database_now(),
    )
    return _made(store_out(store))


@ops_router.get("/tenants", response=PageOut[TenantOut])
def tenants(request: HttpRequest, after: Text = "") -> dict[str, Any]:
    """List tenants with their homes."""
    current = queries.epoch()
    return page(_tenants(), "slug", after, lambda tenant: _tenant(tenant, current))


@ops_router.post("/tenants", response={201: TenantOut, 403: Error, 404: Error, 409: Error})
def add_tenant(request: HttpRequest, body: TenantIn) -> Status[dict[str, Any]]:
    """Register a tenant, place it and publish it (admin)."""
    tenant = services.add_tenant(
        body.slug,
        name=body.name,
        app_name=body.app_name,
        cell=find(Cell, "cell", slug=body.cell),
        store=find(Store, "store", key=body.store),
        time_zone=body.time_zone,
        weight=body.weight,
        tier=body.tier,
        by=require(request, Role.ADMIN).name,
        now=database_now(),
    )
    return _made(_tenant(_tenants().get(pk=tenant.pk), queries.epoch()))


@ops_router.get("/tenants/{slug:slug}", response={200: TenantOut, 404: Error})
def tenant(request: HttpRequest, slug: str) -> dict[str, Any]:
    """Answer one tenant with its home."""
    found = _tenants().filter(slug=slug).first()
    if found is None:
        raise missing("tenant", slug)
    return _tenant(found, queries.epoch())


@ops_router.post(
    "/tenants/{slug:slug}/internal", response={200: TenantOut, 403: Error, 404: Error, 409: Error}
)
def set_internal(request: HttpRequest, slug: str, body: InternalIn) -> dict[str, Any]:
    """Say whether a tenant is internal (admin)."""
    by = require(request, Role.ADMIN).name
    tenant = services.set_internal(
        find(Tenant, "tenant", slug=slug), **body.dict(), by=by, now=database_now()
    )
    return _tenant(_tenants().get(pk=tenant.pk), queries.epoch())


@ops_router.get("/instances", response={200: PageOut[InstanceOut], 404: Error})
def instances(
    request: HttpRequest, cell: Slug | None = None, alive: bool = True, after: Text = ""
) -> dict[str, Any]:
    """List runtime instances, of one cell or of all; with alive=false the gone ones too."""
    rows = RuntimeInstance.objects.select_related("cell")
    if cell is not None:
        rows = rows.filter(cell=find(Cell, "cell", slug=cell))
    if alive:
        rows = rows.filter(gone_at=None)
    return page(rows, "key", after, _instance)


DEAD = {200: InstanceOut, 403: Error, 404: Error, 409: Error, 422: Error}


@ops_router.post("/instances/{slug:key}/dead", response=DEAD)
def ask_dead(request: HttpRequest, key: str, body: WhyIn) -> dict[str, Any]:
    """Ask that an instance be declared dead (operator, with a reason). Another person confirms."""
    actor = require(request, Role.OPERATOR)
    row = services.ask_dead(
        find(RuntimeInstance, "instance", key=key),
        person=actor.person,
        by=actor.name,
        reason=body.reason,
        now=database_now(),
    )
    return _instance(row)


@ops_router.post("/instances/{slug:key}/dead/confirm", response=DEAD)
def confirm_dead(request: HttpRequest, key: str) -> dict[str, Any]:
    """Confirm as a second person that an instance is dead: no fence waits for it (operator)."""
    actor = require(request, Role.OPERATOR)
    row = services.confirm_dead(
        find(RuntimeInstance, "instance", key=key),
        person=actor.person,
        by=actor.name,
        now=database_now(),
    )
    return _instance(row)


@ops_router.post("/instances/{slug:key}/dead/withdraw", response=DEAD)
def withdraw_dead(request: HttpRequest, key: str) -> dict[str, Any]:
    """Take one's own ask to declare an instance dead back (operator)."""
    actor = require(request, Role.OPERATOR)
    row = services.withdraw_dead(
        find(RuntimeInstance, "instance", key=key),
        person=actor.person,
        by=actor.name,
        now=database_now(),
    )
    return _instance(row)


@ops_router.get("/tokens", response={200: PageOut[TokenOut], 403: Error})
def tokens(request: HttpRequest, after: int = 0) -> dict[str, Any]:
    """List tokens (admin). Secrets are kept nowhere."""
    require(request, Role.ADMIN)
    rows = Token.objects.select_related("tenant", "user").prefetch_related("cells")
    return page(rows, "pk", after, _token_row)


@ops_router.post("/tokens", response={201: NewTokenOut, 403: Error, 404: Error, 409: Error})
def make_token(request: HttpRequest, body: TokenIn) -> Status[dict[str, Any]]:
    """Make a token (admin). The answer is the only time its secret is shown."""
    by = require(request, Role.ADMIN).name
    token, secret = services.make_token(
        body.name,
        role=body.role,
        cells=[find(Cell, "cell", slug=slug) for slug in sorted(set(body.cells))],
        tenant=find(Tenant, "tenant", slug=body.tenant) if body.tenant else None,
        # Nobody makes a token that acts for somebody else.
        user=cast(User, request.user) if body.role is TokenRole.OPERATOR else None,
        expires_at=body.expires_at,
        by=by,
        now=database_now(),
    )
    return _made({**_token_row(token), "secret": secret})


@ops_router.post(
    "/tokens/{int:token_id}/revoke",
    response={200: TokenOut, 403: Error, 404: Error, 409: Error},
)
def revoke_token(request: HttpRequest, token_id: int, body: WhyIn) -> dict[str, Any]:
    """Revoke a token (admin). It opens nothing from a second later."""
    by = require(request, Role.ADMIN).name
    token = find(Token, "token", pk=token_id)
    return _token_row(services.revoke_token(token, by=by, reason=body.reason, now=database_now()))


@ops_router.get(
    "/tenants/{slug:slug}/members", response={200: PageOut[MemberOut], 403: Error, 404: Error}
)
def members(request: HttpRequest, slug: str, after: int = 0) -> dict[str, Any]:
    """List the people who see a tenant's usage and nothing else (admin)."""
    require(request, Role.ADMIN)
    rows = Membership.objects.select_related("user", "tenant")
    return page(rows.filter(tenant=find(Tenant, "tenant", slug=slug)), "pk", after, _member)


@ops_router.post(
    "/tenants/{slug:slug}/members",
    response={201: MemberOut, 403: Error, 404: Error, 409: Error},
)
def add_member(request: HttpRequest, slug: str, body: MemberIn) -> Status[dict[str, Any]]:
    """Let a person see a tenant's usage, and nothing else (admin)."""
    by = require(request, Role.ADMIN).name
    tenant = find(Tenant, "tenant", slug=slug)
    user = _sign_in(body.name)
    return _made(_member(services.add_member(user, tenant=tenant, by=by, now=database_now())))


@ops_router.post(
    "/tenants/{slug:slug}/members/remove",
    response={204: None, 403: Error, 404: Error, 409: Error},
)
def remove_member(request: HttpRequest, slug: str, body: MemberIn) -> Status[None]:
    """Let a person see a tenant's usage no longer (admin)."""
    by = require(request, Role.ADMIN).name
    tenant = find(Tenant, "tenant", slug=slug)
    services.remove_member(_sign_in(body.name), tenant=tenant, by=by, now=database_now())
    return Status(204, None)


def _sign_in(name: str) -> User:
    user = User.objects.filter(username=name).first()
    if user is None:
        raise NotFound(
            f"There is no sign-in {name}. `manage.py member {name} TENANT --new` makes one."
        )
    return user


def _made(row: dict[str, Any]) -> Status[dict[str, Any]]:
    return Status(201, row)


def find(model: type[Row], what: str, **key: Any) -> Row:
    """Return the row that a caller names by this key. Raises NotFound."""
    row = model._default_manager.filter(**key).first()
    if row is None:
        raise missing(what, next(iter(key.values())))
    return row


def missing(what: str, name: Any) -> NotFound:
    """Return the refusal of a row that is not there; it names the list that has those which are."""
    return NotFound(f"There is no {what} {name}. GET /api/v1/ops/{what}s lists them.")


def page(
    rows: QuerySet[Row],
    key: str,
    after: str | int,
    shown: Callable[[Row], dict[str, Any]],
    *,
    newest_first: bool = False,
) -> dict[str, Any]:
    """Return up to PAGE rows past `after` in the order of `key`, which is unique.

    Empty or 0: from the first; with `newest_first` that is the one with the highest key.
    """
    if after:
        rows = rows.filter(**{f"{key}__{'lt' if newest_first else 'gt'}": after})
    found = list(rows.order_by(f"{'-' if newest_first else ''}{key}")[: PAGE + 1])
    more = len(found) > PAGE
    return {
        "items": [shown(row) for row in found[:PAGE]],
        "next": str(getattr(found[PAGE - 1], key)) if more else None,
    }


def _tenants() -> QuerySet[Tenant]:
    return Tenant.objects.select_related(
        "agent", "placement__cell", "placement__store"
    ).prefetch_related("entries")


def _region(row: Region) -> dict[str, Any]:
    return {"slug": row.slug, "name": row.name}


def _cell(row: Cell) -> dict[str, Any]:
    return {
        "slug": row.slug,
        "region": row.region.slug,
        "url": row.url,
        "policy_version": str(row.policy_version),
        "quota_tokens_per_minute": row.quota_tokens_per_minute,
        "quota_requests_per_minute": row.quota_requests_per_minute,
        "quota_verified_at": row.quota_verified_at,
        "quota_verified_by": row.quota_verified_by,
        "fast_until": row.fast_until,
    }


def store_out(row: Store) -> dict[str, Any]:
    """Return a store as `OpsStoreOut` has it."""
    return {
        "key": row.key,
        "region": row.region.slug,
        "kind": row.kind,
        "address_from": row.address_from,
        "artifacts_from": row.artifacts_from,
        "memory_from": row.memory_from,
        "surveyed_at": row.surveyed_at,
    }


def _tenant(row: Tenant, epoch: str) -> dict[str, Any]:
    home = row.placement
    accepts = [entry.accepts for entry in row.entries.all() if entry.cell_id == home.cell_id]
    return {
        "slug": row.slug,
        "name": row.name,
        "app_name": row.app_name,
        "agent": row.agent.slug,
        "time_zone": row.time_zone,
        "weight": row.weight,
        "tier": row.tier,
        "internal": row.internal,
        "cell": home.cell.slug,
        "store": home.store.key,
        "placement_version": str(Version(epoch, home.placement_version)),
        "accepts": accepts[0],
    }


def _instance(row: RuntimeInstance) -> dict[str, Any]:
    applied = Version(row.applied_epoch, row.applied_version)
    return {
        "instance": row.key,
        "name": row.name,
        "cell": row.cell.slug,
        "build": row.build,
        "stores": row.stores,
        "plugins": row.plugins,
        "joined_at": row.joined_at,
        "lease_until": row.lease_until,
        "polled_at": row.polled_at,
        "reported_at": row.reported_at,
        "applied_version": str(applied) if row.applied_epoch else "",
        "in_flight": row.in_flight,
        "gone_at": row.gone_at,
        "gone_why": row.gone_why,
        "dead_asked_at": row.dead_asked_at,
        "dead_asked_by": row.dead_asked_by,
        "dead_asked_why": row.dead_asked_why,
    }


def _member(row: Membership) -> dict[str, Any]:
    return {
        "name": row.user.get_username(),
        "tenant": row.tenant.slug,
        "at": row.at,
        "by": row.by,
    }


def _token_row(row: Token) -> dict[str, Any]:
    return {
        "id": row.pk,
        "name": row.name,
        "prefix": row.prefix,
        "role": row.role,
        "cells": sorted(cell.slug for cell in row.cells.all()),
        "tenant": row.tenant.slug if row.tenant is not None else None,
        "user": row.user.get_username() if row.user is not None else None,
        "created_at": row.created_at,
        "created_by": row.created_by,
        "expires_at": row.expires_at,
        "last_used_at": row.last_used_at,
        "revoked_at": row.revoked_at,
    }

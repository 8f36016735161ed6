"""The HTTP API under /api/v1/: who may call what, and one shape for every refusal.

Runtimes, gateways and programs of operators come with a bearer token; a signed-in operator's
page may call the operator part with its session cookie and the CSRF token.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from django.conf import settings
from django.contrib.auth.models import User
from django.core.exceptions import RequestDataTooBig
from django.db import OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import URLPattern, URLResolver, re_path
from django.views.decorators.csrf import csrf_exempt
from ninja import NinjaAPI
from ninja.errors import HttpError, ValidationError
from ninja.security import APIKeyCookie, HttpBearer

from capacity.api_isolation import router as isolation_router
from capacity.api_limits import router as limits_router
from capacity.api_usage import ops_router as usage_router
from capacity.api_usage import tenant_router
from durable.clock import database_now
from durable.errors import Refused
from migrations_app.api import restored_router, stores_router
from migrations_app.api import router as moves_router
from migrations_app.api_channels import router as channels_router
from migrations_app.api_rehearsals import router as rehearsals_router
from migrations_app.api_safety import router as safety_router
from tenants import queries, services
from tenants.api import Forbidden, ops_router, placement_router, require, runtime_router
from tenants.domain.requests import request_id
from tenants.domain.roles import Actor, Role, TokenRole
from tenants.models import Tenant, Token

log = logging.getLogger(__name__)

# How long a token's row may be taken from memory: a revoked one opens nothing afterwards.
TOKEN_SECONDS = 1.0
TOKENS_KEPT = 10_000
# Errors of validation that one answer names.
ERRORS_SHOWN = 5
# Of the name of a field that a caller made up.
NAME_SHOWN = 60


class TokenCache:
    """The rows of tokens in use, for a second each, so that a poll needs no look-up of its own.

    Only tokens that were found are kept, under their digest: no secret stays in memory, and a
    flood of wrong ones takes no room.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, Token]] = {}

    def find(self, secret: str) -> Token | None:
        """Return the token that this secret opens, at most a second old, or None."""
        key = queries.digest(secret)
        kept = self._kept.get(key)
        moment = time.monotonic()
        if kept is not None and moment < kept[0]:
            return kept[1]
        now = database_now()
        token = queries.token_for(secret, now=now)
        if token is None:
            self._kept.pop(key, None)
            return None
        services.note_token_use(token, now=now)
        if len(self._kept) >= TOKENS_KEPT:
            self._kept.clear()
        # Counted from before the row was read, so that it is never older than it seems.
        self._kept[key] = (moment + TOKEN_SECONDS, token)
        return token

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()


tokens = TokenCache()


class _RoleToken(HttpBearer):
    """A bearer token of one role. A token of another is known and not allowed: 403, not 401."""

    role: TokenRole

    def authenticate(self, request: HttpRequest, token: str) -> Token | None:
        found = tokens.find(token)
        if found is not None and found.role != self.role:
            raise Forbidden(
                f"This needs a token of role {self.role}; {found.name} is one of {found.role}. Ask"
                " an admin for the right one."
            )
        return found


class RuntimeToken(_RoleToken):
    role = TokenRole.RUNTIME


class GatewayToken(_RoleToken):
    role = TokenRole.GATEWAY


class OperatorToken(_RoleToken):
    """Acts with the rights that its user has now."""

    role = TokenRole.OPERATOR

    def authenticate(self, request: HttpRequest, token: str) -> Any:
        found = super().authenticate(request, token)
        if found is None or found.user is None:
            return None
        request.user = found.user
        name = f"{found.user.get_username()} (token {found.name})"
        return _actor(request, name[: services.WHO_MAX])


class UsageToken(HttpBearer):
    """A tenant's token, or an operator's: whoever may read the usage of a tenant."""

    def authenticate(self, request: HttpRequest, token: str) -> Any:
        found = tokens.find(token)
        if found is None or found.role == TokenRole.TENANT:
            return found
        if found.role == TokenRole.OPERATOR:
            return OperatorToken().authenticate(request, token)
        raise Forbidden(
            f"This needs a tenant's token; {found.name} is a {found.role} token. Ask an admin for "
            "the right one."
        )


class SignedIn(APIKeyCookie):
    """A person's session; what changes something needs the CSRF token beside it."""

    param_name = settings.SESSION_COOKIE_NAME

    def __call__(self, request: HttpRequest) -> Actor | Tenant | None:
        # A wrong token isn't made good by a cookie; and without a session there is nothing
        # that CSRF would protect: 401, not 403.
        if "Authorization" in request.headers or not request.user.is_authenticated:
            return None
        return cast("Actor | Tenant | None", super().__call__(request))

    def authenticate(self, request: HttpRequest, key: str | None) -> Actor | Tenant:
        return _actor(request, request.user.get_username())


class UsageSignedIn(SignedIn):
    """A tenant's person, who is their tenant here, or an operator."""

    def authenticate(self, request: HttpRequest, key: str | None) -> Actor | Tenant:
        tenant = queries.tenant_of(request.user)
        return super().authenticate(request, key) if tenant is None else tenant


def _actor(request: HttpRequest, name: str) -> Actor:
    """Return who asks; what only reads needs a viewer, anything else an operator at least."""
    role = queries.role_of(cast(User, request.user))
    if role is None:
        raise Forbidden(f"{name} has no role here. Ask an admin to be made a viewer or more.")
    request.auth = actor = Actor(name, role, request.user.get_username())  # type: ignore[attr-defined]
    # Here and not in each function, so that none can forget it.
    require(request, Role.VIEWER if request.method in {"GET", "HEAD"} else Role.OPERATOR)
    return actor


class Api(NinjaAPI):
    """Ninja, behind its own authentication instead of the pages' redirect to the sign-in."""

    def _get_urls(self) -> list[URLResolver | URLPattern]:
        patterns = [*super()._get_urls(), re_path("", _nothing_here)]
        for pattern in cast(list[Any], patterns):
            # Ninja makes its own addresses from the root, and answers it in another shape.
            if pattern.name == "api-root":
                pattern.callback = _nothing_here
            pattern.callback = _one_shape(pattern.callback)
            pattern.callback.login_required = False
        return patterns


def _one_shape(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Answer a wrong method as everything else; Ninja itself has only a line of text for it."""

    @functools.wraps(view)
    def shaped(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        answer = view(request, *args, **kwargs)
        if answer.status_code != 405:
            return answer
        # Ninja keeps them in a set, so in any order.
        allowed = ", ".join(sorted(answer["Allow"].split(", ")))
        detail = f"{request.method} does nothing at this address. It takes {allowed}."
        response = _error(request, 405, "method_not_allowed", detail)
        response["Allow"] = allowed
        return response

    return shaped


# Nothing is changed here, and a program with a token that mistyped an address has no cookie.
@csrf_exempt
def _nothing_here(request: HttpRequest) -> HttpResponse:
    detail = "There is nothing at this address. The document is at /api/v1/openapi.json."
    return _error(request, 404, "not_found", detail)


api = Api(
    title="Switchyard",
    version="1",
    description=__doc__ or "",
    urls_namespace="api",
    # The document is public: it says how to ask, not what there is. Its viewer would need
    # scripts from elsewhere, which the Content-Security-Policy refuses.
    docs_url=None,
)
api.add_router("/runtime", runtime_router, auth=RuntimeToken())
api.add_router("/placement", placement_router, auth=GatewayToken())
api.add_router("/tenants", tenant_router, auth=[UsageToken(), UsageSignedIn()])
operators = [OperatorToken(), SignedIn()]
api.add_router("/ops/moves", moves_router, auth=operators)
api.add_router("/ops/restored", restored_router, auth=operators)
api.add_router("/ops/stores", stores_router, auth=operators)
api.add_router("/ops", channels_router, auth=operators)
api.add_router("/ops", rehearsals_router, auth=operators)
api.add_router("/ops", safety_router, auth=operators)
api.add_router("/ops", isolation_router, auth=operators)
api.add_router("/ops", usage_router, auth=operators)
api.add_router("/ops", limits_router, auth=operators)
api.add_router("/ops", ops_router, auth=operators)


def _error(
    request: HttpRequest,
    status: int,
    error: str,
    detail: str,
    retry_after_seconds: float | None = None,
) -> HttpResponse:
    body = {"error": error, "detail": detail, "retry_after_seconds": retry_after_seconds}
    response = api.create_response(request, body, status=status)
    if retry_after_seconds is not None:
        response["Retry-After"] = str(max(1, round(retry_after_seconds)))
    return response


@api.exception_handler(Refused)
def _refused(request: HttpRequest, error: Refused) -> HttpResponse:
    return _error(request, error.status, error.code, str(error), error.retry_after_seconds)


@api.exception_handler(ValidationError)
def _invalid(request: HttpRequest, error: ValidationError) -> HttpResponse:
    # Where and why, never what: an input may hold a secret.
    named = [f"{_where(one['loc'])}: {_why(one)}" for one in error.errors[:ERRORS_SHOWN]]
    if more := len(error.errors) - len(named):
        named.append(f"and {more} more")
    return _error(request, 422, "invalid", "; ".join(named))


def _where(loc: Sequence[str | int]) -> str:
    """Return which field a caller has to look at, without the names that only our code has."""
    place, *rest = loc
    if place == "path":
        return "the address"
    # The first is the name of our function's argument.
    names = rest[1:] if place == "body" else rest
    return ".".join(str(name)[:NAME_SHOWN] for name in names) or "the body"


def _why(error: dict[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        return "there is no such field, so nothing was done"
    return str(error["msg"])


@api.exception_handler(HttpError)
def _http(request: HttpRequest, error: HttpError) -> HttpResponse:
    words = {400: "bad_request", 401: "unauthorized", 403: "forbidden", 429: "too_many_requests"}
    detail = str(error)
    if error.status_code == 401:
        detail = (
            "Send a bearer token that is in force, or sign in. An expired or revoked one opens "
            "nothing."
        )
    response = _error(request, error.status_code, words.get(error.status_code, "error"), detail)
    if error.status_code == 401:
        response["WWW-Authenticate"] = "Bearer"
    return response


@api.exception_handler(Http404)
def _not_found(request: HttpRequest, error: Http404) -> HttpResponse:
    return _error(request, 404, "not_found", "There is no such row.")


@api.exception_handler(RequestDataTooBig)
def _too_big(request: HttpRequest, error: RequestDataTooBig) -> HttpResponse:
    limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    return _error(request, 413, "too_big", f"A request may have {limit:,} bytes. Send less.")


@api.exception_handler(OperationalError)
def _database(request: HttpRequest, error: OperationalError) -> HttpResponse:
    log.error("The database failed under %s: %s", request.path, error)
    detail = "The database does not answer just now. Try again."
    return _error(request, 503, "database_unavailable", detail, 1)


@api.exception_handler(Exception)
def _failed(request: HttpRequest, error: Exception) -> HttpResponse:
    log.exception("%s %s failed (request %s)", request.method, request.path, request_id.get())
    detail = f"This is our mistake. The log has it under request {request_id.get()}."
    return _error(request, 500, "internal", detail)

"""One name for one request, and sign-in for every page, told apart for polled fragments."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from urllib.parse import urlencode, urlsplit

from django.conf import settings
from django.contrib.auth.middleware import LoginRequiredMiddleware
from django.contrib.sessions.middleware import SessionMiddleware
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.urls import reverse

from tenants.domain.requests import request_id

# What a proxy or a client may choose: nothing that could break out of a log line or a page.
SANE_ID = re.compile(r"[A-Za-z0-9._-]{8,64}")


def request_id_middleware(
    get_response: Callable[[HttpRequest], HttpResponse],
) -> Callable[[HttpRequest], HttpResponse]:
    """Take the caller's X-Request-ID if it is sane, else make one.

    It is in the answer's headers and in every audit line that the request causes.
    """

    def middleware(request: HttpRequest) -> HttpResponse:
        given = request.headers.get("X-Request-ID", "")
        chosen = given if SANE_ID.fullmatch(given) else uuid.uuid4().hex
        outer = request_id.set(chosen)
        try:
            response = get_response(request)
        finally:
            # The thread serves other requests after this one.
            request_id.reset(outer)
        response["X-Request-ID"] = chosen
        return response

    return middleware


class SaneSession(SessionMiddleware):
    """Take a session cookie that no session can have for none.

    A quoted cookie may spell a NUL ("\\000"), which PostgreSQL does not even look up: anybody
    could fill the log with errors of ours.
    """

    def process_request(self, request: HttpRequest) -> None:
        """Drop such a cookie before anything reads it."""
        key = request.COOKIES.get(settings.SESSION_COOKIE_NAME, "")
        if not (key.isascii() and key.isalnum()):
            request.COOKIES.pop(settings.SESSION_COOKIE_NAME, None)
        super().process_request(request)


class SignInRequired(LoginRequiredMiddleware):
    """Send people without a session to the sign-in page, the whole page with them.

    A polled fragment that got Django's redirect would draw the sign-in form inside its panel.
    """

    def handle_no_permission(
        self, request: HttpRequest, view_func: Callable[..., HttpResponseBase]
    ) -> HttpResponseBase:
        """Answer htmx with 401 and where the page should go; everybody else with a redirect."""
        if request.headers.get("HX-Request") != "true":
            return super().handle_no_permission(request, view_func)
        back = urlencode({"next": _path(request.headers.get("HX-Current-URL", ""))})
        return HttpResponse(status=401, headers={"HX-Redirect": f"{reverse('login')}?{back}"})


def _path(url: str) -> str:
    """Return the path of an address that a caller sent; / where it is none."""
    try:
        return urlsplit(url).path or "/"
    except ValueError:
        return "/"

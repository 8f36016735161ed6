"""One name for one request, and sign-in for every page, told apart for polled fragments."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from urllib.parse import urlencode, urlsplit

from django.contrib.auth.middleware import LoginRequiredMiddleware
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
        seen = urlsplit(request.headers.get("HX-Current-URL", ""))
        back = urlencode({"next": seen.path or "/"})
        return HttpResponse(status=401, headers={"HX-Redirect": f"{reverse('login')}?{back}"})

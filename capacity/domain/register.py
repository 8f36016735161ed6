"""What agents of several tenants share, and the kinds of harm that one could do another by it."""

from __future__ import annotations

from enum import StrEnum

from durable.errors import Refused

NAME_MAX, TEXT_MAX = 100, 2_000


class Kind(StrEnum):
    """Which isolation a shared resource could break: three of the runtime, and data."""

    PERFORMANCE = "performance"  # One tenant's load makes another's turns late or fail.
    AUTHORITY = "authority"  # A run uses credentials, tools or a model account of another tenant.
    FAULT = "fault"  # A crash, a loop or a bad dependency of one tenant spreads.
    DATA = "data"  # One tenant reads what another wrote.


MEANING = {
    Kind.PERFORMANCE: "One tenant’s load can’t push another’s latency or errors past its SLO.",
    Kind.AUTHORITY: "A run uses only its own tenant’s credentials, tools and model account,"
    " whatever the model is tricked into asking for.",
    Kind.FAULT: "A crash, a loop or a bad dependency of one tenant’s run stays with that tenant.",
    Kind.DATA: "No tenant reads or changes what another wrote.",
}


class BadResource(Refused):
    """A line of the register would not say what is shared, or how it could harm."""

    status = 422


class ResourceTaken(Refused):
    """The register names this resource already."""


class ResourceChanged(Refused):
    """Somebody else has changed the line since it was read."""


def check_resource(name: str, kind: str, control: str, shown_by: str) -> None:
    """Raise BadResource unless a line of the register can be kept as it is given.

    An empty control is no mistake but a finding, and is kept as one.

    >>> check_resource("Model quota of a cell", "performance", "", "")
    """
    if not name.strip() or len(name) > NAME_MAX or not name.isprintable():
        raise BadResource(
            f"Name what is shared in one line of 1 to {NAME_MAX} visible characters, such as"
            " “Model quota of a cell”."
        )
    if kind not in list(Kind):
        raise BadResource(
            f"No kind of isolation is called {kind[:40]!r}. Choose one of: {', '.join(Kind)}."
        )
    for what, text in (("control", control), ("proof", shown_by)):
        if len(text) > TEXT_MAX or "\0" in text:
            raise BadResource(f"The {what} holds up to {TEXT_MAX:,} characters and no NUL.")

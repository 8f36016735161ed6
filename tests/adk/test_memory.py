"""What is given to a memory service is the session that google-adk itself reads from the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from google.adk.events import Event, EventActions
from google.genai import types

from migrations_app.domain.values import Layout
from migrations_app.ports.base import Key
from migrations_app.ports.memory import Recalled, recall
from tests.adk.layouts import ACME, Place

NATIVE = (Layout.POSTGRESQL, Layout.SQLITE, Layout.ADK_SQLITE)


@pytest.fixture(params=NATIVE, ids=lambda layout: layout.name.lower())
def place(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    new_database: Callable[[], str],
) -> Place:
    """A store of each layout, which nobody has closed."""
    layout = request.param
    url = new_database() if layout is Layout.POSTGRESQL else f"sqlite:///{tmp_path}/store.db"
    monkeypatch.setenv("RECALLED", url)
    return Place(layout, url, "env:RECALLED")


async def test_a_session_is_recalled_as_google_adk_reads_it(place: Place) -> None:
    call = types.Part(function_call=types.FunctionCall(name="look", args={"deep": {"er": [1]}}))
    blob = types.Part(inline_data=types.Blob(mime_type="image/png", data=b"\x00\xff\xfe"))
    thought = types.Part(text="hm", thought=True, thought_signature=b"\xff\xfe")
    async with place.adk() as service:
        session = await service.create_session(
            app_name=ACME,
            user_id="ann",
            session_id="one",
            state={"topic": "tea", "user:tier": "pro", "app:motto": "hello"},
        )
        for part in (types.Part(text="what about tea?"), call, blob, thought):
            content = types.Content(role="user", parts=[part])
            actions = EventActions(state_delta={"turn": part.text or "none", "user:seen": True})
            event = Event(author="user", invocation_id="i-1", content=content, actions=actions)
            await service.append_event(session, event)
        await service.create_session(app_name=ACME, user_id="ann", session_id="empty")
        wanted = {
            name: await service.get_session(app_name=ACME, user_id="ann", session_id=name)
            for name in ("one", "empty")
        }
    with place.port() as store:
        keys = [Key("ann", "one"), Key("ann", "gone"), Key("ann", "empty")]
        found = list(recall(store, ACME, keys))
    assert [one.key.session_id for one in found if isinstance(one, Recalled)] == ["one", "empty"]
    for one in found:
        assert isinstance(one, Recalled)
        theirs = wanted[one.key.session_id]
        assert theirs is not None
        ours, other = one.session.model_dump(), theirs.model_dump()
        # A port's times are in whole microseconds.
        assert ours.pop("last_update_time") == pytest.approx(
            other.pop("last_update_time"), abs=1e-6
        )
        assert ours == other

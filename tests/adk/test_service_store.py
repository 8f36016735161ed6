"""Stores behind google-adk's services: their guard, replay that goes on, state that is shared."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from google.adk.errors._stale_session_error import StaleSessionError
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.sessions import BaseSessionService, InMemorySessionService
from google.genai import types

from durable.machine import Overtaken
from migrations_app import ports
from migrations_app.domain import canonical
from migrations_app.domain.mismatch import Looks
from migrations_app.domain.values import OURS, Layout
from migrations_app.ports import mixed, service
from migrations_app.ports.base import (
    START,
    AddressMissing,
    CannotHold,
    Change,
    Counts,
    Guard,
    GuardTaken,
    Kept,
    Key,
    Mark,
    NotASessionStore,
    SharedRow,
    StoreBusy,
    Unreachable,
)
from migrations_app.ports.service import ServiceStore
from migrations_app.ports.service_link import AdkMissing
from tests.adk import layouts
from tests.adk.layouts import ACME, MEMORIES, Place

MEMORY, FILE, SERVER = Layout.SERVICE, Layout.SERVICE_ADK_SQLITE, Layout.SERVICE_POSTGRESQL
S0, S1 = Key("u0", "s0"), Key("u1", "s1")
SECOND = 1_760_000_000.25
T = TypeVar("T")

on_both = pytest.mark.parametrize("layout", [MEMORY, FILE], ids=["memory", "file"])


@contextmanager
def opened(place: Place, *, move: int = 1, claim: int = 1) -> Iterator[ServiceStore]:
    kind = layouts.kind_of(place.layout)
    with ports.open_store(kind, place.reference, app_name=ACME, move=move, claim=claim) as store:
        yield store  # type: ignore[misc]


def agent(place: Place, work: Callable[[BaseSessionService], Awaitable[T]]) -> T:
    """Do something as an agent of the tenant does."""

    async def run() -> T:
        async with place.adk() as service:
            return await work(service)

    return asyncio.run(run())


async def turns(service: BaseSessionService, key: Key, first: int, last: int) -> None:
    """Append events, each of which sets a key of every scope."""
    session = await service.get_session(app_name=ACME, user_id=key[0], session_id=key[1])
    assert session is not None
    for number in range(first, last):
        delta = {"n": number, "user:n": f"{key[1]}-{number}", "app:n": number, "temp:n": 1}
        await service.append_event(
            session,
            Event(
                id=f"{key[1]}-e{number}",
                invocation_id="i",
                author="user",
                timestamp=SECOND + number,
                actions=EventActions(state_delta=delta),
            ),
        )


async def fill(service: BaseSessionService) -> None:
    for user, name in (S0, S1, Key("u0", "s2")):
        await service.create_session(
            app_name=ACME, user_id=user, session_id=name, state={"topic": name, "user:tier": "pro"}
        )
        await turns(service, Key(user, name), 0, 3)


async def events_of(service: BaseSessionService, key: Key) -> list[str]:
    found = await service.get_session(app_name=ACME, user_id=key[0], session_id=key[1])
    return [event.id for event in found.events] if found else []


def copy_all(source: Place, target: Place) -> None:
    with source.port() as here, target.port() as there:
        keys = [key for key, _ in here.page(START, 100)]
        batch = ports.copy(here, there, keys)
        assert set(batch.copied) == set(keys)
        ports.write_shared(here, there, here.shared_page(None, 100))


# --- opening -----------------------------------------------------------------------------------


def failing() -> InMemorySessionService:
    raise ConnectionError("the password is secret")


def nothing() -> object:
    return object()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("python:tests.adk.nowhere:make", "could not be opened as a session service"),
        ("python:tests.adk.test_service_store:nobody", "AttributeError"),
        ("python:tests.adk.test_service_store:failing", "ConnectionError"),
        ("python:", "ValueError"),
        ("mystery://host/db", "could not be opened"),
        ("memory://", "every process would have one of its own"),
        ("sqlite://", "four slashes"),
        ("sqlite:///relative.db", "four slashes"),
        ("/some/path", "neither a URI"),
    ],
)
def test_an_address_that_leads_nowhere_is_refused_and_not_quoted(
    address: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_BAD", address)
    with (
        pytest.raises(AddressMissing, match=words) as refused,
        ports.open_store("adk-service", "env:STORE_BAD", app_name=ACME),
    ):
        pass
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_what_is_no_session_service_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_BAD", "python:tests.adk.test_service_store:nothing")
    with (
        pytest.raises(NotASessionStore, match="BaseSessionService"),
        ports.open_store("adk-service", "env:STORE_BAD", app_name=ACME),
    ):
        pass


def test_without_google_adk_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_BAD", "agentengine://1")
    monkeypatch.setitem(sys.modules, "google.adk.cli.service_registry", None)
    with (
        pytest.raises(AdkMissing, match=r"switchyard\[adk\]"),
        ports.open_store("adk-service", "env:STORE_BAD", app_name=ACME),
    ):
        pass


def test_a_server_that_does_not_answer_is_unreachable_and_not_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STORE_BAD", "postgresql+psycopg://u:secret@127.0.0.1:1/none")
    with (
        pytest.raises(Unreachable) as refused,
        ports.open_store("adk-service", "env:STORE_BAD", app_name=ACME),
    ):
        pass
    assert "secret" not in str(refused.value)
    assert "127.0.0.1" not in f"{refused.value} {caplog.text}"


# --- the guard -----------------------------------------------------------------------------------


@on_both
def test_the_guard_is_invisible_and_rises(
    layout: Layout, new_place: Callable[[Layout, str], Place]
) -> None:
    place = new_place(layout, "TARGET")
    with ports.open_store("adk-service", place.reference, app_name="") as nobody:
        assert nobody.guards() == {}
    with opened(place) as store:
        store.provision()
        assert store.guard() is None
        store.adopt(None, mover=True, agents=False)
        assert store.guard() == Guard(1, 1, True, False)
    with ports.open_store("adk-service", place.reference, app_name="") as nobody:
        found = nobody.guards(["support.other", ACME])
        # Whoever held it is closed, and has said so.
        assert found == {ACME: Guard(1, 1, True, False)}
    with opened(place) as store:
        assert store.page(START, 10) == []
        assert store.counts() == Counts(0, 0)
        assert store.shared_page(None, 10) == []
        assert store.survey().sessions == 0
        assert store.mark() == str(Mark())
    with opened(place, claim=3) as store:
        store.take(mover=False, agents=False)
    for claim, move, error in ((2, 1, Overtaken), (9, 7, Overtaken)):
        with opened(place, claim=claim, move=move) as store, pytest.raises(error):
            store.take(mover=True, agents=True)
    with opened(place, move=2) as store:
        with pytest.raises(GuardTaken, match="mv-1"):
            store.adopt(Guard(1, 2, True, False), mover=True, agents=False)
        store.adopt(Guard(1, 3, False, False), mover=False, agents=True)
        assert store.guard() == Guard(2, 1, False, True)
        assert not store.can_close()


def test_a_guard_that_was_never_adopted_is_not_taken(
    new_place: Callable[[Layout, str], Place],
) -> None:
    with opened(new_place(MEMORY, "TARGET")) as store, pytest.raises(GuardTaken):
        store.take(mover=True, agents=False)


@on_both
def test_the_guard_leaves_one_session_however_often_it_is_taken(
    layout: Layout, new_place: Callable[[Layout, str], Place]
) -> None:
    place = new_place(layout, "TARGET")
    place.prepare()
    for claim in range(2, 6):
        with opened(place, claim=claim) as store:
            store.take(mover=True, agents=False)

    async def ours(service: BaseSessionService) -> int:
        return len((await service.list_sessions(app_name=ACME, user_id=OURS)).sessions)

    assert agent(place, ours) == 1


def test_who_was_faster_keeps_the_guard(
    new_place: Callable[[Layout, str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = new_place(MEMORY, "TARGET")
    place.prepare()
    with opened(place, claim=2) as slow, opened(place, claim=3) as fast:
        put = slow._put

        async def late(number: int, row: Any) -> bool:
            # Between the look and the write of one, another takes and releases; its numbers go.
            monkeypatch.undo()
            fast.take(mover=True, agents=False)
            fast.take(mover=True, agents=False)
            return await put(number, row)

        monkeypatch.setattr(slow, "_put", late)
        with pytest.raises(Overtaken):
            slow.take(mover=True, agents=False)
        assert fast.guard() == Guard(1, 3, True, False)
        fast.run(fast.check())


def test_a_worker_that_did_not_say_its_end_is_waited_for(
    new_place: Callable[[Layout, str], Place], settings: Any
) -> None:
    settings.DURABLE_STEP_SECONDS = 20.0
    place = new_place(MEMORY, "TARGET")
    place.prepare()
    with opened(place, claim=2) as killed:
        killed.take(mover=True, agents=False)
        # As if it had been killed here.
        killed._holds = False
    with opened(place, claim=3) as store:
        with pytest.raises(StoreBusy, match="claim 2") as busy:
            store.take(mover=True, agents=False)
        assert 15 < (busy.value.retry_after_seconds or 0) <= 20
        settings.DURABLE_STEP_SECONDS = 0.05
        time.sleep(0.06)
        store.take(mover=True, agents=False)
    with opened(place, claim=4) as store:
        # The last one said its end.
        settings.DURABLE_STEP_SECONDS = 20.0
        store.take(mover=True, agents=False)


@pytest.mark.parametrize("what", ["copy", "delete", "delete_unchanged", "write_shared"])
def test_a_write_under_another_claim_changes_nothing(
    what: str, new_place: Callable[[Layout, str], Place]
) -> None:
    source, target = new_place(MEMORY, "SOURCE"), new_place(FILE, "TARGET")
    agent(source, fill)
    target.prepare()
    copy_all(source, target)
    agent(source, lambda service: turns(service, S0, 3, 5))
    with source.port() as here, opened(target) as asleep:
        with opened(target, claim=2) as awake:
            awake.take(mover=False, agents=True)
        before = asleep.mark()
        writes = {
            "copy": lambda: ports.copy(here, asleep, [S0, S1]),
            "delete": lambda: asleep.delete([S0]),
            "delete_unchanged": lambda: asleep.delete_unchanged(asleep.stamps([S0])),
            "write_shared": lambda: asleep.write_shared(here.shared_page(None, 10)),
        }
        with pytest.raises(Overtaken):
            writes[what]()
        assert asleep.mark() == before


# --- replay --------------------------------------------------------------------------------------


def test_a_session_that_takes_longer_than_a_step_is_gone_on_with(
    new_place: Callable[[Layout, str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = new_place(MEMORY, "SOURCE"), new_place(FILE, "TARGET")
    agent(source, fill)
    agent(source, lambda service: turns(service, S0, 3, 80))
    target.prepare()
    monkeypatch.setattr(mixed, "REPLAY_SECONDS", 0.15)
    seen = [0]
    with source.port() as here, target.port() as there:
        for _ in range(100):
            batch = ports.copy(here, there, [S0, S1])
            # Whatever is through is told, so that it need not be looked at again.
            assert {*batch.copied, *batch.unfinished} == {S0, S1}
            if not batch.unfinished:
                break
            seen.append(len(agent(target, lambda service: events_of(service, S0))))
        assert set(batch.copied) == {S0, S1}
        ours, theirs = ports.digests_of_both(here, there, [S0, S1])
        assert [ours[k][:2] for k in (S0, S1)] == [theirs[k][:2] for k in (S0, S1)]
    assert len(seen) > 1
    # Each step added to what the one before had left.
    assert seen == sorted(seen)
    assert seen[-1] > 0


async def fill_oddly(service: BaseSessionService) -> None:
    """Write what is legal and easy to spoil on the way."""
    state = {
        " user:x": 1,
        "temp": {"deep": [None, {"": None, "n": [1.0, -1e-7, 2**70]}]},
        "user:": "no name",
        "app:": {"none": None},
        "user:app:k": [],
        "big": "x€" * 500_000,
    }
    made = await service.create_session(
        app_name=ACME, user_id="ü 'q' %s", session_id="%s {id}\\", state=state
    )
    for name, at in (("a", -86_400.25), ("b", 0.0), ("c", 0.0), ("d\t", SECOND)):
        event = Event(
            id=name,
            invocation_id="",
            author="user",
            timestamp=at,
            content=types.Content(
                parts=[
                    types.Part(text="y€" * 200_000 if name == "a" else ""),
                    types.Part(inline_data=types.Blob(data=b"\xff\x00\xfb", mime_type="x/y")),
                    types.Part(
                        function_call=types.FunctionCall(
                            id="f", name="tool", args={"a": None, "b": {"c": [None, 0.1 + 0.2]}}
                        )
                    ),
                ]
            ),
            actions=EventActions(
                state_delta={"n": None, "deep": {"a": {"b": None}}, "user:": "still none"},
                artifact_delta={"f.txt": 2},
            ),
            custom_metadata={"k": None, "m": {"x": [None]}},
        )
        await service.append_event(made, event)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Layout.POSTGRESQL, SERVER),
        (Layout.POSTGRESQL, FILE),
        (Layout.SQLITE, MEMORY),
        (FILE, Layout.POSTGRESQL),
        (MEMORY, Layout.ADK_SQLITE),
        (SERVER, MEMORY),
    ],
)
def test_what_is_legal_and_easy_to_spoil_arrives(
    one: Layout, other: Layout, new_place: Callable[[Layout, str], Place]
) -> None:
    source, target = new_place(one, "SOURCE"), new_place(other, "TARGET")
    agent(source, fill_oddly)
    target.prepare()
    copy_all(source, target)
    with source.port() as here, target.port() as there:
        [(key, _)] = here.page(START, 10)
        ours, theirs = ports.digests_of_both(here, there, [key])
        assert ours[key][:2] == theirs[key][:2], ports.difference(here, there, key)
        shared = here.shared_page(None, 10)
        held = there.shared([row.user_id for row in shared])
        assert all(ports.same_shared(here, there, row, held[row.user_id]) for row in shared)
        assert ports.counts_of_both(here, there)[0] == ports.counts_of_both(here, there)[1]

    async def read(service: BaseSessionService) -> Any:
        found = await service.get_session(app_name=ACME, user_id=key[0], session_id=key[1])
        assert found is not None
        return found.model_dump()

    assert agent(target, read) == agent(source, read)


def test_only_what_came_since_is_appended_and_an_edit_is_written_anew(
    new_place: Callable[[Layout, str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = new_place(FILE, "SOURCE"), new_place(MEMORY, "TARGET")
    agent(source, fill)
    target.prepare()
    copy_all(source, target)
    appended: list[str] = []
    append = InMemorySessionService.append_event

    async def counting(self: Any, session: Any, event: Event) -> Event:
        if event.author != "migration":
            appended.append(event.id)
        return await append(self, session, event)

    monkeypatch.setattr(InMemorySessionService, "append_event", counting)
    agent(source, lambda service: turns(service, S0, 3, 5))
    copy_all(source, target)
    assert appended == ["s0-e3", "s0-e4"]
    # Somebody writes on the target: no beginning of the source any more.
    agent(target, lambda service: turns(service, S1, 7, 8))
    appended.clear()
    copy_all(source, target)
    assert appended == ["s1-e0", "s1-e1", "s1-e2"]
    assert agent(target, lambda service: events_of(service, S1)) == appended


@pytest.mark.parametrize("error", [StaleSessionError, AlreadyExistsError])
def test_a_session_that_somebody_else_writes_is_done_again(
    error: type[Exception],
    new_place: Callable[[Layout, str], Place],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = new_place(FILE, "SOURCE"), new_place(MEMORY, "TARGET")
    agent(source, fill)
    target.prepare()
    append, left = InMemorySessionService.append_event, [2]

    async def stale(self: Any, session: Any, event: Event) -> Event:
        if event.id == "s0-e1" and left[0]:
            left[0] -= 1
            raise error("somebody else")
        return await append(self, session, event)

    monkeypatch.setattr(InMemorySessionService, "append_event", stale)
    with source.port() as here, target.port() as there:
        assert set(ports.copy(here, there, [S0]).copied) == {S0}
        left[0] = 9
        # Never for ever: it is left out whole, and named.
        assert there.delete([S0]) == 1
        batch = ports.copy(here, there, [S0, S1])
        assert (set(batch.copied), set(batch.refused)) == ({S1}, {S0})
        assert error.__name__ in batch.refused[S0].reason
        assert there.stamps([S0]) == {}


def test_a_session_that_is_given_another_id_is_left_out_and_named(
    new_place: Callable[[Layout, str], Place],
) -> None:
    """As memory does with an empty one; a survey has stopped at it before."""
    source, target = new_place(Layout.SERVICE_SQLITE, "SOURCE"), new_place(MEMORY, "TARGET")
    agent(source, fill)
    agent(
        source, lambda service: service.create_session(app_name=ACME, user_id="u0", session_id="")
    )
    target.prepare()
    nameless = Key("u0", "")
    with source.port() as here, target.port() as there:
        assert [one.field for one in here.survey().findings if one.blocks] == ["sessions.id"]
        batch = ports.copy(here, there, [nameless, S0])
        assert (set(batch.copied), set(batch.refused)) == ({S0}, {nameless})
        assert batch.refused[nameless].field == "sessions.id"
        assert [key for key, _ in there.page(START, 10)] == [S0]


def test_a_session_that_vanished_is_deleted_and_absent(
    new_place: Callable[[Layout, str], Place],
) -> None:
    source, target = new_place(MEMORY, "SOURCE"), new_place(FILE, "TARGET")
    agent(source, fill)
    target.prepare()
    copy_all(source, target)
    agent(
        source,
        lambda service: service.delete_session(app_name=ACME, user_id="u0", session_id="s0"),
    )
    with source.port() as here, target.port() as there:
        assert set(ports.copy(here, there, [S0, S1]).copied) == {S1}
        assert set(there.stamps([S0, S1])) == {S1}
        assert there.counts() == here.counts() == Counts(2, 2)


def test_only_unchanged_sessions_are_deleted(new_place: Callable[[Layout, str], Place]) -> None:
    place = new_place(FILE, "SOURCE")
    agent(place, fill)
    place.prepare()
    with place.port() as store:
        stamps = dict(store.page(START, 10))
        agent(place, lambda service: turns(service, S0, 3, 4))
        gone = store.delete_unchanged(stamps | {Key("u9", "gone"): "x"})
        assert set(gone) == set(stamps) - {S0}
        assert [key for key, _ in store.page(START, 10)] == [S0]


def test_pages_walk_every_session_once_and_stamps_are_those_of_the_list(
    new_place: Callable[[Layout, str], Place],
) -> None:
    place = new_place(SERVER, "SOURCE")
    agent(place, fill)
    with place.port() as store:
        whole = dict(store.page(START, 100))
        walked, after = [], START
        while page := store.page(after, 2):
            walked += page
            after = page[-1][0]
        assert dict(walked) == whole == store.stamps(list(whole))
        assert list(whole) == sorted(whole)
        assert all(len(stamp) <= 120 for stamp in whole.values())
        agent(place, lambda service: turns(service, S0, 3, 4))
        assert store.stamps([S0]) != {S0: whole[S0]}
        # A new walk reads the list anew.
        assert dict(store.page(START, 100))[S0] != whole[S0]


# --- shared state --------------------------------------------------------------------------------


@on_both
def test_a_copied_session_leaves_shared_state_as_it_was(
    layout: Layout, new_place: Callable[[Layout, str], Place]
) -> None:
    """Replayed events set `user:` and `app:` keys to what they were then."""
    source, target = new_place(FILE, "SOURCE"), new_place(layout, "TARGET")
    if layout is FILE:
        source = new_place(MEMORY, "SOURCE")
    agent(source, fill)
    target.prepare()
    copy_all(source, target)
    with source.port() as here, target.port() as there:
        settled = there.shared_page(None, 10)
        assert [row.user_id for row in settled] == [None, "u0", "u1"]
        there.delete([S0])
        ports.copy(here, there, [S0])
        assert there.shared_page(None, 10) == settled
        assert there.shared([None, "u0", "u1"]) == {row.user_id: row for row in settled}
        assert all(
            ports.same_shared(here, there, row, here.shared([row.user_id]).get(row.user_id))
            for row in settled
        )
        # Nothing of a scratch session is left.
        assert there.counts() == Counts(3, 2)


def test_a_key_that_the_source_lacks_is_nulled_and_named(
    new_place: Callable[[Layout, str], Place],
) -> None:
    source, target = new_place(FILE, "SOURCE"), new_place(MEMORY, "TARGET")
    agent(source, fill)
    target.prepare()
    copy_all(source, target)
    MEMORIES["TARGET"].user_state[ACME]["u0"]["extra"] = {"deep": 1}
    with source.port() as here, target.port() as there:
        [ours] = here.shared(["u0"]).values()
        there.write_shared([ours])
        [theirs] = there.shared(["u0"]).values()
        assert '"extra":null' in theirs.state
        assert not ports.same_shared(here, there, ours, theirs)
        found = ports.name_shared(here, there, ours, theirs)
        assert found is not None
        assert (found.part, found.looks_like) == ("user", Looks.CANNOT_HOLD)
        assert found.text == "user:extra is null there: a service deletes no key"
        # Looked at again it is not written again.
        there.write_shared([ours])


def test_shared_state_of_an_emptied_tenant_counts_as_gone(
    new_place: Callable[[Layout, str], Place],
) -> None:
    place = new_place(FILE, "TARGET")
    agent(place, fill)
    place.prepare()
    with place.port() as store:
        assert store.delete([key for key, _ in store.page(START, 10)]) == 3
        # Its own users can't be listed any more; the app's keys are nulled.
        assert [row.user_id for row in store.shared_page(None, 10)] == [None]
        assert store.delete_shared([None, "u0"]) == 2
        assert store.shared_page(None, 10) == []


def test_an_empty_state_and_none_are_the_same_to_a_service(
    new_place: Callable[[Layout, str], Place],
) -> None:
    with new_place(FILE, "SOURCE").port() as here, new_place(MEMORY, "TARGET").port() as there:
        assert ports.same_shared(here, there, SharedRow("u9", "{}", ""), None)
        assert not ports.same_shared(here, there, SharedRow("u9", '{"a": null}', ""), None)


def test_state_is_replaced_only_where_it_still_is_what_it_was(
    new_place: Callable[[Layout, str], Place],
) -> None:
    place = new_place(FILE, "TARGET")
    agent(place, fill)
    place.prepare()
    with place.port() as store:
        [now] = store.shared(["u0"]).values()
        assert not store.replace_shared(SharedRow("u0", '{"tier": "basic"}', ""), "{}")
        assert store.replace_shared(SharedRow("u0", '{"tier": "basic"}', ""), now.state)
        assert store.shared(["u0"])["u0"].state == '{"n":null,"tier":"basic"}'
        assert store.replace_shared(SharedRow("u5", '{"a": 1}', ""), "{}")
        assert store.shared(["u5"])["u5"].state == '{"a":1}'


def test_who_set_a_key_last_is_looked_for_from_the_youngest_session_on(
    new_place: Callable[[Layout, str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = new_place(FILE, "TARGET")
    agent(place, fill)
    agent(place, lambda service: turns(service, S1, 3, 5))
    place.prepare()
    with place.port() as store:
        read: list[Key] = []
        whole = store.whole
        monkeypatch.setattr(store, "whole", lambda keys: read.extend(keys) or whole(keys))
        last = {"n": Change(round((SECOND + 4) * 1e6), canonical.value_digest("s1-4"))}
        assert store.last_changes("u1", ["n", "never"], list) == last
        assert store.last_changes("u1", [], list) == {}
        read.clear()
        last = {"n": Change(round((SECOND + 4) * 1e6), canonical.value_digest(4))}
        assert store.last_changes(None, ["n"], list) == last
        # None of the others can hold a younger event.
        assert read == [S1]
        read.clear()
        # What is only a copy has set nothing here.
        last = {"n": Change(round((SECOND + 2) * 1e6), canonical.value_digest(2))}
        others = {S0, Key("u0", "s2")}
        assert store.last_changes(None, ["n"], others.intersection) == last
        assert set(read) == others
        read.clear()
        assert store.last_changes(None, ["never"], list) == {}
        assert len(read) == 3
        read.clear()
        monkeypatch.setattr(service, "LOOK_SECONDS", 0.0)
        assert store.last_changes(None, ["never"], list) == {}
        assert len(read) == store.at_once == 1


def test_the_mark_is_what_a_sweep_adds_up_row_by_row(
    new_place: Callable[[Layout, str], Place],
) -> None:
    place = new_place(FILE, "SOURCE")
    agent(place, fill)
    with place.port() as store:
        swept = Mark()
        for key, stamp in store.page(START, 10):
            swept.session(key, stamp)
        swept.shared(store.shared_page(None, 10))
        assert str(swept) == store.mark()
        agent(place, lambda service: turns(service, S0, 3, 4))
        assert store.mark() != str(swept)


# --- one place under two addresses ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "native"),
    [
        (SERVER, Layout.POSTGRESQL),
        (FILE, Layout.ADK_SQLITE),
        (Layout.SERVICE_SQLITE, Layout.SQLITE),
    ],
)
def test_a_service_and_tables_know_that_they_are_one_database(
    layout: Layout,
    native: Layout,
    new_place: Callable[[Layout, str], Place],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = new_place(layout, "SOURCE")
    monkeypatch.setenv("STORE_TABLES", service.url)
    tables = Place(native, service.url, "env:STORE_TABLES")
    other = new_place(native, "OTHER")
    other.prepare()
    with service.port() as one, tables.port() as same, other.port() as elsewhere:
        for here, there in ((one, same), (same, one)):
            here.write_nonce("word")
            assert there.has_nonce("word")
            assert not elsewhere.has_nonce("word")
            here.clear_nonce("word")
            assert not there.has_nonce("word")
            assert not here.has_nonce("word")


# --- what a service keeps ------------------------------------------------------------------------


class Forgetful(InMemorySessionService):
    """Gives events ids and whole seconds of its own, and sessions its own time."""

    async def append_event(self, session: Any, event: Event) -> Event:
        event = event.model_copy(
            update={"id": Event.new_id(), "timestamp": float(int(event.timestamp))}
        )
        done = await super().append_event(session, event)
        stored = self.sessions[session.app_name][session.user_id][session.id]
        stored.last_update_time = session.last_update_time = 5.0
        return done


class Renaming(InMemorySessionService):
    """Gives sessions ids of its own."""

    async def create_session(self, **named: Any) -> Any:
        return await super().create_session(**{**named, "session_id": None})


class Lossy(InMemorySessionService):
    """Keeps events without one of their parts, as stores of other languages do."""

    lost: dict[str, Any]

    async def append_event(self, session: Any, event: Event) -> Event:
        return await super().append_event(session, event.model_copy(update=self.lost))


def test_what_a_service_does_not_keep_is_left_out_and_said(
    new_place: Callable[[Layout, str], Place],
) -> None:
    source, target = new_place(FILE, "SOURCE"), new_place(MEMORY, "TARGET")
    MEMORIES["TARGET"] = Forgetful()
    agent(source, fill)
    target.prepare()
    with source.port() as here, target.port() as there:
        assert there.keeps_ids()
        # Read from the guard: this handle has tried nothing.
        assert there.kept == Kept(True, False, False, False)
        keys = [key for key, _ in here.page(START, 10)]
        assert set(ports.copy(here, there, keys).copied) == set(keys)
        ours, theirs = ports.digests_of_both(here, there, keys)
        assert {k: d[:2] for k, d in ours.items()} == {k: d[:2] for k, d in theirs.items()}
        assert ports.difference(here, there, S0) is None
        assert ports.fingerprint_words(here, there) == (
            "canonical; without event ids, event times, session times, which not both keep"
        )
        assert ports.fingerprint_words(here, here) == (
            "canonical, with event ids, event times, session times"
        )


def test_a_service_that_renames_sessions_is_found_out_and_leaves_nothing(
    new_place: Callable[[Layout, str], Place],
) -> None:
    source, target = new_place(FILE, "SOURCE"), new_place(MEMORY, "TARGET")
    agent(source, fill)
    MEMORIES["TARGET"] = service = Renaming()
    with target.port() as there:
        assert not there.keeps_ids()
    assert not any(service.sessions[ACME].values())


class Folding(InMemorySessionService):
    """Finds a session whatever the case of its id, as MySQL's default collation does."""

    async def get_session(self, *, session_id: str, **named: Any) -> Any:
        found = await self.list_sessions(app_name=named["app_name"], user_id=named["user_id"])
        ids = [one.id for one in found.sessions if one.id.casefold() == session_id.casefold()]
        return await super().get_session(session_id=ids[0] if ids else session_id, **named)


@pytest.mark.parametrize("kind", [InMemorySessionService, Folding])
def test_a_service_that_ignores_case_is_found_out_and_leaves_nothing(
    new_place: Callable[[Layout, str], Place], kind: type[InMemorySessionService]
) -> None:
    place = new_place(MEMORY, "TARGET")
    MEMORIES["TARGET"] = service = kind()
    with place.port() as there:
        assert there.folds_case() is (kind is Folding)
    assert not any(service.sessions[ACME].values())


@pytest.mark.parametrize("lost", ["actions", "custom_metadata"])
def test_a_service_that_loses_parts_of_events_is_refused(
    lost: str, new_place: Callable[[Layout, str], Place]
) -> None:
    target = new_place(MEMORY, "TARGET")
    MEMORIES["TARGET"] = service = Lossy()
    service.lost = {lost: EventActions() if lost == "actions" else None}
    with target.port() as there, pytest.raises(CannotHold, match="as it was given one"):
        there.provision()
    assert not any(service.sessions[ACME].values())


def test_a_survey_says_what_a_service_can_and_cannot_tell(
    new_place: Callable[[Layout, str], Place],
) -> None:
    place = new_place(SERVER, "SOURCE")
    agent(place, fill)
    with place.port() as store:
        found = store.survey()
    assert (found.kind, found.database) == (
        "adk-service",
        "DatabaseSessionService on postgresql",
    )
    assert (found.sessions, found.users, found.events, found.interrupted) == (3, 2, 9, 0)
    assert (found.can_close, found.stamps_see_edits, found.has_app_state) == (False, False, True)
    assert found.findings == ()
    with new_place(Layout.POSTGRESQL, "TARGET").port() as target:
        ports.check_pair(found, target.survey())


class Repeating(InMemorySessionService):
    """Lists each session twice, as over pages in the order of last changes."""

    async def list_sessions(self, **named: Any) -> Any:
        listed = await super().list_sessions(**named)
        listed.sessions *= 2
        return listed


def test_a_session_that_is_listed_twice_is_one(new_place: Callable[[Layout, str], Place]) -> None:
    place = new_place(MEMORY, "SOURCE")
    MEMORIES["SOURCE"] = Repeating()
    agent(place, fill)
    with place.port() as store:
        assert store.counts().sessions == len(store.page(START, 10)) == 3
        assert store.survey().sessions == 3

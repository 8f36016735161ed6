"""What each side of a split does with each request, over real Runners and real SQLite stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.sessions import DatabaseSessionService, InMemorySessionService
from google.adk.sessions.sqlite_session_service import SqliteSessionService

from agent_runtime import Draining, Host, Moved, NotHere, PolicyClient, RetryLater
from bench import scripted
from tests.runtime.wire import ControlPlane, DrivenClock, entry, make_client

SERVED = "served"
# What a store that does not know a session says to a turn of it.
NOT_FOUND = ValueError

# accepts, split, home cell -> by (known, sent on): what becomes of a turn, a birth, a deletion.
# Known: the side's own store has the session.
RULES: dict[tuple[str, bool, str | None], dict[tuple[bool, bool], tuple[Any, Any, Any]]] = {
    ("all", False, None): {
        (True, False): (SERVED, AlreadyExistsError, SERVED),
        (False, False): (NOT_FOUND, SERVED, SERVED),
        (True, True): (SERVED, AlreadyExistsError, SERVED),
        (False, True): (NOT_FOUND, SERVED, SERVED),
    },
    # The source, while older turns still run somewhere and nobody takes a birth.
    ("existing", False, None): {
        (True, False): (SERVED, AlreadyExistsError, Draining),
        (False, False): (Draining, Draining, Draining),
        (True, True): (SERVED, AlreadyExistsError, Draining),
        (False, True): (Draining, Draining, Draining),
    },
    # The source of a split.
    ("existing", True, None): {
        (True, False): (SERVED, AlreadyExistsError, Draining),
        (False, False): (NotHere, NotHere, NotHere),
        (True, True): (SERVED, AlreadyExistsError, Draining),
        (False, True): (NotHere, NotHere, NotHere),
    },
    # The source in its drain: sessions that were born on the target must go on being served.
    ("none", True, None): {
        (True, False): (Draining, Draining, Draining),
        (False, False): (NotHere, NotHere, NotHere),
        (True, True): (Draining, Draining, Draining),
        (False, True): (NotHere, NotHere, NotHere),
    },
    # The target of a split: the store of the new side answers for all that the source sent on.
    ("new", False, "home"): {
        (True, False): (Moved, Moved, Moved),
        (False, False): (Moved, Moved, Moved),
        (True, True): (SERVED, AlreadyExistsError, SERVED),
        (False, True): (NOT_FOUND, SERVED, SERVED),
    },
    # Its target while the way back is fenced; only announced.
    ("none", False, "home"): {
        (True, False): (Moved, Moved, Moved),
        (False, False): (Moved, Moved, Moved),
        (True, True): (Draining, Draining, Draining),
        (False, True): (Draining, Draining, Draining),
    },
    ("none", False, None): {
        (True, False): (Draining, Draining, Draining),
        (False, False): (Draining, Draining, Draining),
        (True, True): (Draining, Draining, Draining),
        (False, True): (Draining, Draining, Draining),
    },
}
CASES = [
    pytest.param(
        side,
        known,
        sent_on,
        act,
        outcome,
        id=f"{'-'.join(map(str, side))} {'known' if known else 'unknown'}"
        f"{' sent on' * sent_on} {act}",
    )
    for side, answers in RULES.items()
    for (known, sent_on), outcomes in answers.items()
    for act, outcome in zip(("turn", "birth", "deletion"), outcomes, strict=True)
]


class Watched(DatabaseSessionService):
    """ADK's own service, which says how it was asked, and can be held in its look."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"sqlite+aiosqlite:///{path}")
        self.looks: list[Any] = []
        self.looking = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def get_session(self, *, config: Any = None, **names: Any) -> Any:
        if config is not None and config.num_recent_events == 0:
            self.looks.append(names)
            self.looking.set()
            await self.may_answer.wait()
        return await super().get_session(config=config, **names)


@pytest.fixture
def plane() -> ControlPlane:
    return ControlPlane()


@pytest.fixture
def client(plane: ControlPlane) -> PolicyClient:
    return make_client(plane, DrivenClock())


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Watched]:
    """One with the session "known" of user u1."""
    service = Watched(tmp_path / "store.sqlite3")
    await service.create_session(app_name="support.acme", user_id="u1", session_id="known")
    yield service
    await service.close()


@pytest.fixture
async def host(client: PolicyClient, store: Watched) -> AsyncIterator[Host]:
    host = Host(
        client,
        {"pg-eu": lambda: store},
        lambda entry, service: scripted.build_runner(entry.app_name, service),
    )
    yield host
    await host.close()


def tell(plane: ControlPlane, client: PolicyClient, side: tuple[str, bool, str | None]) -> None:
    accepts, split, home_cell = side
    plane.publish(entry("acme", accepts=accepts, split=split, home_cell=home_cell))
    client.tick()
    assert client.trouble == ""


async def do(host: Host, act: str, session: str | None, *, sent_on: bool = False) -> None:
    how: dict[str, Any] = {"placement_version": "e1.10", "sent_on": sent_on}
    if act == "turn":
        async for _ in host.run("acme", "u1", str(session), scripted.message("hi"), **how):
            pass
    elif act == "birth":
        await host.create_session("acme", "u1", session_id=session, **how)
    else:
        await host.delete_session("acme", "u1", str(session), **how)


async def contents(store: Watched) -> dict[str, int]:
    """Each session of u1 with its events."""
    listed = await store.list_sessions(app_name="support.acme", user_id="u1")
    found = {}
    for one in listed.sessions:
        whole = await store.get_session(app_name="support.acme", user_id="u1", session_id=one.id)
        found[one.id] = len(whole.events)
    return found


@pytest.mark.parametrize(("side", "known", "sent_on", "act", "outcome"), CASES)
async def test_each_side_does_with_each_request_what_the_table_says(
    host: Host,
    store: Watched,
    plane: ControlPlane,
    client: PolicyClient,
    side: tuple[str, bool, str | None],
    known: bool,
    sent_on: bool,
    act: str,
    outcome: Any,
) -> None:
    tell(plane, client, side)
    session = "known" if known else "unknown"
    came_of: Any = SERVED
    try:
        await do(host, act, session, sent_on=sent_on)
    except Exception as error:
        came_of = type(error)
    assert came_of == outcome or (outcome is NOT_FOUND and issubclass(came_of, ValueError))
    assert client.fence.word().in_flight == {}
    if came_of != SERVED:
        assert await contents(store) == {"known": 0}
    elif act == "turn":
        assert (await contents(store))["known"] == 4
    else:
        born = {"known": 0, "unknown": 0} if act == "birth" else {"known": 0}
        assert await contents(store) == ({} if act == "deletion" and known else born)


@pytest.mark.parametrize(
    ("side", "outcome"),
    [
        (("existing", False, None), Draining),
        (("existing", True, None), NotHere),
        (("none", True, None), NotHere),
        (("new", False, "home"), Moved),
    ],
    ids=["narrowed", "source", "draining source", "target"],
)
async def test_a_birth_under_an_id_of_the_stores_choice_is_unknown_everywhere(
    host: Host,
    store: Watched,
    plane: ControlPlane,
    client: PolicyClient,
    side: tuple[str, bool, str | None],
    outcome: type[RetryLater],
) -> None:
    tell(plane, client, side)
    with pytest.raises(outcome):
        await do(host, "birth", None)
    # There is nothing to look for.
    assert store.looks == []


async def test_one_look_without_events_finds_a_session(
    host: Host, store: Watched, plane: ControlPlane, client: PolicyClient
) -> None:
    tell(plane, client, ("existing", True, None))
    await do(host, "turn", "known")
    assert store.looks == [{"app_name": "support.acme", "user_id": "u1", "session_id": "known"}]


@pytest.mark.parametrize("accepts", ["all", "new"])
async def test_nothing_is_looked_for_where_nothing_depends_on_it(
    host: Host, store: Watched, plane: ControlPlane, client: PolicyClient, accepts: str
) -> None:
    tell(plane, client, (accepts, False, None if accepts == "all" else "home"))
    await do(host, "turn", "known", sent_on=True)
    assert store.looks == []


@pytest.mark.parametrize("act", ["turn", "birth", "deletion"])
async def test_who_looks_at_an_open_source_is_counted_by_then(
    host: Host, store: Watched, plane: ControlPlane, client: PolicyClient, act: str
) -> None:
    """The source closes while a turn looks: it is waited for, for it may go on to write."""
    tell(plane, client, ("existing", True, None))
    store.may_answer.clear()
    task = asyncio.create_task(do(host, act, "known"))
    await store.looking.wait()
    tell(plane, client, ("none", True, None))
    assert plane.reports[-1]["in_flight"] == plane.reports[-1]["in_flight_older"] == {"acme": 1}
    store.may_answer.set()
    await asyncio.wait([task])
    assert (task.exception() is None) == (act == "turn")
    assert (await contents(store))["known"] == (4 if act == "turn" else 0)
    client.tick()
    assert plane.reports[-1]["in_flight"] == {}


async def test_who_looks_behind_a_closed_source_is_counted_nowhere(
    host: Host, store: Watched, plane: ControlPlane, client: PolicyClient
) -> None:
    """Every turn of the target's sessions looks here first: a count of 0 has to stay 0."""
    tell(plane, client, ("none", True, None))
    store.may_answer.clear()
    task = asyncio.create_task(do(host, "turn", "elsewhere"))
    await store.looking.wait()
    client.tick()
    assert plane.reports[-1]["in_flight"] == {}
    store.may_answer.set()
    with pytest.raises(NotHere):
        await task


async def test_a_session_that_an_older_turn_is_giving_birth_to_is_not_sent_on(
    host: Host, store: Watched, plane: ControlPlane, client: PolicyClient
) -> None:
    """The race that `in_flight_older` closes: nobody says "not here" while older turns run."""
    tell(plane, client, ("all", False, None))
    store.may_answer.clear()
    with client.fence.enter("acme"):  # It creates "young" in a moment.
        tell(plane, client, ("existing", False, None))
        assert plane.reports[-1]["in_flight_older"] == {"acme": 1}
        store.may_answer.set()
        with pytest.raises(Draining) as refused:
            await do(host, "turn", "young")
        assert refused.value.retry_after_seconds == 5
        await store.create_session(app_name="support.acme", user_id="u1", session_id="young")
    client.tick()
    assert plane.reports[-1]["in_flight_older"] == {}
    tell(plane, client, ("existing", True, None))
    await do(host, "turn", "young")


async def test_what_goes_on_elsewhere_is_neither_a_turn_nor_a_refusal_here(
    host: Host, plane: ControlPlane, client: PolicyClient
) -> None:
    for accepts in ("existing", "none"):
        tell(plane, client, (accepts, True, None))
        for act in ("turn", "birth", "deletion"):
            with pytest.raises(NotHere):
                await do(host, act, "elsewhere")
    client.tick()
    assert plane.usage == []
    assert plane.reports[-1]["dirty"] == []


async def test_what_a_draining_source_refuses_of_its_own_is_demand(
    host: Host, plane: ControlPlane, client: PolicyClient
) -> None:
    tell(plane, client, ("none", True, None))
    with pytest.raises(Draining):
        await do(host, "turn", "known")
    client.tick()
    assert [line["refused"] for line in plane.usage] == [{"draining": 1}]


async def test_a_look_that_fails_lets_its_turn_out(
    host: Host,
    store: Watched,
    plane: ControlPlane,
    client: PolicyClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken(**names: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(store, "get_session", broken)
    for accepts in ("existing", "none"):
        tell(plane, client, (accepts, True, None))
        with pytest.raises(ZeroDivisionError):
            await do(host, "turn", "known")
        assert client.fence.word().in_flight == {}


@pytest.mark.parametrize("kind", ["sql", "sqlite", "memory"])
async def test_each_kind_of_session_service_says_whether_it_knows_a_session(
    client: PolicyClient, plane: ControlPlane, tmp_path: Path, kind: str
) -> None:
    service: Any = {
        "sql": lambda: DatabaseSessionService(f"sqlite+aiosqlite:///{tmp_path}/one.db"),
        "sqlite": lambda: SqliteSessionService(str(tmp_path / "two.db")),
        "memory": InMemorySessionService,
    }[kind]()
    await service.create_session(app_name="support.acme", user_id="u1", session_id="known")
    host = Host(
        client,
        {"pg-eu": lambda: service},
        lambda entry, service: scripted.build_runner(entry.app_name, service),
    )
    tell(plane, client, ("existing", True, None))
    await do(host, "turn", "known")
    with pytest.raises(NotHere):
        await do(host, "turn", "unknown")
    await host.close()


@pytest.mark.parametrize("kind", ["sqlite", "memory"])
@pytest.mark.parametrize("act", ["turn", "birth", "deletion"])
async def test_the_target_serves_no_copy_under_an_id_that_it_strips(
    client: PolicyClient, plane: ControlPlane, tmp_path: Path, kind: str, act: str
) -> None:
    service: Any = {
        "sqlite": lambda: SqliteSessionService(str(tmp_path / "two.db")),
        "memory": InMemorySessionService,
    }[kind]()
    names = {"app_name": "support.acme", "user_id": "u1", "session_id": "known"}
    await service.create_session(**names)
    host = Host(
        client,
        {"pg-eu": lambda: service},
        lambda entry, service: scripted.build_runner(entry.app_name, service),
    )
    tell(plane, client, ("new", False, "home"))
    # The source tells it from "known", which is its own: it has sent this on.
    with pytest.raises(NotHere):
        await do(host, act, " known", sent_on=True)
    assert (await service.get_session(**names)).events == []
    await host.close()

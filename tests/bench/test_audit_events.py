"""The audit that every lossless claim rests on finds each kind of fault."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from bench.audit_events import Home, Lived, Verdict, audit, main
from bench.journal import Journal, Line


class World:
    """A store with one session of one turn, and the journal of the client that held it."""

    def __init__(self, folder: Path) -> None:
        self.database = sqlite3.connect(folder / "store.db", isolation_level=None)
        self.database.execute(
            "CREATE TABLE events"
            " (app_name, user_id, session_id, id, invocation_id, event_data, timestamp)"
        )
        self.database.execute("CREATE TABLE user_states (app_name, user_id, state)")
        self.path = folder / "client.jsonl"
        self.journal = Journal(self.path)
        self.home = Home("support.acme", f"sqlite+aiosqlite:///{folder / 'store.db'}")
        for name, author in (("e0", "user"), ("e1", "agent"), ("e2", "agent")):
            self.store(name, author)
        for name in ("e1", "e2"):
            self.tell("event", id=name, store="a")
        self.tell("turn", count=2)

    def store(self, name: str, author: str, app: str = "support.acme") -> None:
        self.database.execute(
            "INSERT INTO events VALUES (?, 'u', 's', ?, 'i1', json_object('author', ?), ?)",
            (app, name, author, name),
        )

    def tell(self, kind: str, **more: object) -> None:
        line = {"kind": kind, "at": 1.0, "tenant": "acme", "user": "u", "session": "s"}
        self.journal.write(Line(**{**line, "invocation": "i1", **more}))  # type: ignore[arg-type]

    def audit(self, **more: object) -> Verdict:
        return audit([self.path], {"acme": self.home}, **more)  # type: ignore[arg-type]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_all_that_was_acknowledged_is_found_the_users_own_event_too(world: World) -> None:
    verdict = world.audit()
    assert str(verdict) == "3 acknowledged, 3 found, 0 doubled"
    assert verdict.clean


@pytest.mark.parametrize(
    "delete",
    ["id = 'e1'", "id = 'e0'"],
    ids=["one of the agent", "the user's"],
)
def test_a_lost_event_is_missing(world: World, delete: str) -> None:
    world.database.execute(f"DELETE FROM events WHERE {delete}")
    verdict = world.audit()
    assert (verdict.found, verdict.clean) == (2, False)


def test_an_event_of_another_app_is_no_substitute(world: World) -> None:
    world.database.execute("DELETE FROM events WHERE id = 'e1'")
    world.store("e1", "agent", app="support.bolt")
    assert world.audit().missing == 1


@pytest.mark.parametrize(
    ("name", "author"),
    [("e1", "agent"), ("e9", "user"), ("e9", "agent")],
    ids=["under its own id", "the user's under a new one", "an agent's under a new one"],
)
def test_an_event_that_is_there_twice_is_doubled(world: World, name: str, author: str) -> None:
    world.store(name, author)
    verdict = world.audit()
    assert verdict.doubled >= 1
    assert not verdict.clean


def test_a_store_that_answers_after_another_has_taken_over_is_noticed(world: World) -> None:
    for name, store in (("e3", "b"), ("e4", "a")):
        world.store(name, "agent")
        world.tell("event", id=name, store=store)
    verdict = world.audit()
    assert verdict.returned == 1
    assert not verdict.clean


@pytest.mark.parametrize(
    ("lived", "clean"), [("aba", True), ("abab", True), ("ab", False), ("bab", False)]
)
def test_a_store_may_answer_again_where_the_tenant_came_back(
    world: World, lived: str, clean: bool
) -> None:
    for number, store in enumerate("ba"):
        world.store(f"e{3 + number}", "agent")
        world.tell("event", at=2.0 + number, id=f"e{3 + number}", store=store)
    world.tell("turn", at=9.0, count=4)
    verdict = world.audit(lived={"acme": list(map(Lived, lived))})
    assert verdict.clean is clean, verdict.examples
    assert verdict.returned == (not clean)


@pytest.mark.parametrize(
    ("answered", "clean"), [("ba", True), ("a", True), ("bab", True), ("aba", False)]
)
def test_in_a_split_only_sessions_that_began_there_live_on_the_target(
    world: World, answered: str, clean: bool
) -> None:
    """It was aborted, and the tenant moved there later."""
    world.path.write_text("")
    for number, store in enumerate(answered):
        world.tell("event", at=1.0 + number, id=f"e{number % 2 + 1}", store=store)
    places = [Lived("b", births=True), Lived("a"), Lived("a"), Lived("b")]
    verdict = world.audit(lived={"acme": [Lived("a"), *places]})
    assert verdict.returned == (not clean)


# --- last words -----------------------------------------------------------------------------------


def say(world: World, name: str, *, at: float, told: float | None, session: str = "s") -> None:
    """Let an event set its user's last word to its own name, and a client be told of it, or not."""
    actions = {"state_delta": {"user:last": name}}
    data = {"author": "agent", "timestamp": at, "actions": actions}
    world.database.execute(
        "INSERT INTO events VALUES ('support.acme', 'u', ?, ?, 'i1', ?, ?)",
        (session, name, json.dumps(data), name),
    )
    if told is not None:
        world.tell("event", at=told, id=name, word=name, made=at, store="a", session=session)


def stands(world: World, word: str) -> bool:
    world.database.execute(
        "INSERT INTO user_states VALUES ('support.acme', 'u', json_object('last', ?))", (word,)
    )
    verdict = world.audit()
    assert verdict.spoken == 1
    return not verdict.outspoken


@pytest.mark.parametrize(("word", "there"), [("e7", True), ("e6", False), ("e5", False)])
def test_the_last_word_that_was_acknowledged_has_to_stand(
    world: World, word: str, there: bool
) -> None:
    say(world, "e6", at=10.0, told=11.0)
    say(world, "e7", at=20.0, told=21.0)
    assert stands(world, word) is there


def test_of_two_words_under_way_at_once_either_may_stand(world: World) -> None:
    say(world, "e6", at=10.0, told=12.0, session="s")
    say(world, "e7", at=11.0, told=11.5, session="other")
    assert stands(world, "e6")


@pytest.mark.parametrize(("at", "there"), [(30.0, True), (1.0, False)])
def test_a_word_that_nobody_was_told_of_may_stand_where_it_is_later(
    world: World, at: float, there: bool
) -> None:
    say(world, "e7", at=20.0, told=21.0)
    say(world, "e8", at=at, told=None)
    assert stands(world, "e8") is there


def test_what_a_deleted_session_said_last_may_be_forgotten(world: World) -> None:
    say(world, "e6", at=10.0, told=11.0)
    world.tell("event", at=21.0, id="e7", word="e7", made=20.0, store="a", session="gone")
    world.tell("deleted", session="gone")
    assert stands(world, "e6")


def test_events_that_changed_places_are_noticed(world: World) -> None:
    world.database.execute("UPDATE events SET timestamp = 'e0' WHERE id = 'e2'")
    verdict = world.audit()
    assert (verdict.disordered, verdict.missing, verdict.clean) == (1, 0, False)


def test_moving_once_is_no_fault(world: World) -> None:
    world.store("e3", "user")
    world.database.execute("UPDATE events SET invocation_id = 'i2' WHERE id = 'e3'")
    world.store("e4", "agent")
    world.database.execute("UPDATE events SET invocation_id = 'i2' WHERE id = 'e4'")
    world.tell("event", id="e4", store="b", invocation="i2")
    assert world.audit().clean


def test_refusals_are_held_against_the_tenant_and_the_time_of_the_fence(world: World) -> None:
    for at in (10.0, 20.0):
        world.tell("refused", at=at, reason="Draining")
    verdict = world.audit()
    assert verdict.refused == {"Draining": 2}
    assert verdict.refused_outside("acme", 5.0, 15.0) == 1
    assert verdict.refused_outside("bolt", 5.0, 25.0) == 2


def test_what_a_client_deleted_is_not_missed(world: World) -> None:
    world.tell("deleting")
    world.tell("deleted")
    world.database.execute("DELETE FROM events")
    verdict = world.audit()
    assert (verdict.acknowledged, verdict.deleted, verdict.clean) == (0, 1, True)


def test_what_a_client_deleted_and_is_there_again_is_a_fault(world: World) -> None:
    world.tell("deleting")
    world.tell("deleted")
    verdict = world.audit()
    assert (verdict.revived, verdict.clean) == (1, False)


def test_what_could_not_be_deleted_is_missed_as_ever(world: World) -> None:
    world.tell("deleting")
    world.tell("refused", reason="Draining")
    world.database.execute("DELETE FROM events WHERE id = 'e1'")
    assert world.audit().missing == 1


@pytest.mark.parametrize("there", [True, False])
def test_what_a_killed_process_was_about_to_delete_may_be_there_or_not(
    world: World, there: bool
) -> None:
    world.tell("deleting")
    if not there:
        world.database.execute("DELETE FROM events")
    assert world.audit().clean


def test_a_line_cut_short_by_a_kill_is_not_counted(world: World) -> None:
    with world.path.open("a") as file:
        file.write('{"kind":"event","at":2.0,"tenant":"acme","us')
    assert world.audit().clean


def test_an_audit_of_postgresql_reads_the_same(
    world: World, store_url: str, tmp_path: Path
) -> None:
    import psycopg

    say(world, "e6", at=10.0, told=11.0)
    say(world, "e7", at=20.0, told=21.0)
    world.tell("turn", at=22.0, count=4)
    with psycopg.connect(store_url) as connection:
        connection.execute("CREATE TABLE user_states (app_name text, user_id text, state jsonb)")
        connection.execute(
            "INSERT INTO user_states VALUES ('support.acme', 'u', '{\"last\": \"e6\"}')"
        )
        connection.execute(
            "CREATE TABLE events (app_name text, user_id text, session_id text, id text,"
            " invocation_id text, event_data jsonb, timestamp text)"
        )
        for row in world.database.execute("SELECT * FROM events"):
            connection.execute("INSERT INTO events VALUES (%s, %s, %s, %s, %s, %s, %s)", row)
    world.home = Home("support.acme", store_url.replace("://", "+psycopg://"))
    verdict = world.audit()
    assert str(verdict) == "5 acknowledged, 5 found, 0 doubled"
    assert (verdict.spoken, verdict.outspoken) == (1, 1)


def test_a_journal_goes_on_where_a_killed_process_left_a_line_unended(world: World) -> None:
    with world.path.open("a") as file:
        file.write('{"kind":"event","at":2.0,"tenant":"acme","us')
    world.journal = Journal(world.path)
    world.store("e3", "agent")
    world.tell("event", at=3.0, id="e3", store="a")
    world.tell("turn", at=4.0, count=3)
    assert str(world.audit()) == "4 acknowledged, 4 found, 0 doubled"
    assert world.audit().clean


def test_the_command_counts_a_tenant_that_went_away_and_came_back(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for store, name in (("b", "e3"), ("a", "e4")):
        world.store(name, "agent")
        world.tell("event", id=name, store=store, at=float(name[1:]))
    world.tell("turn", count=4, at=5.0)
    homes = world.path.with_name("homes.json")
    command = ["audit_events", "--homes", str(homes), str(world.path)]
    monkeypatch.setattr("sys.argv", command)
    for lived, code in (([["a", False], ["b", False]], 1), (["a", "b", "a"], 0)):
        places = [one if isinstance(one, list) else [one] for one in lived]
        homes.write_text(json.dumps({"acme": [world.home.app_name, world.home.url, places]}))
        assert main() == code
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "5 acknowledged, 5 found, 0 doubled"
    assert "acknowledged by a then b then a" in err

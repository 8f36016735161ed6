"""Who may write a tenant through a service: a session of ours that every write looks at first.

Nothing closes such a store: its proof is protocol and lease alone. The row is kept as a session's
state, and changed by making the next session: of all calls only `create_session` is refused when
somebody was faster. Each new row has the next number; the highest counts, and takes the lower away.

Nothing ends a stalled worker's calls either. So a row says whether its handle was closed in good
order; where not, the next claim waits until that worker's hard time limit has killed it.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from django.conf import settings

from durable.machine import Overtaken
from migrations_app.domain.values import OURS, SCRATCH, Layout
from migrations_app.ports import address
from migrations_app.ports.adk_sqlite import AdkSqliteStore
from migrations_app.ports.base import (
    CannotHold,
    Guard,
    Kept,
    StoreBusy,
    StoreRefused,
)
from migrations_app.ports.guard_words import nonce_id, refuse
from migrations_app.ports.postgres import PostgresStore
from migrations_app.ports.service_link import ServiceLink, engine
from migrations_app.ports.sqlite import SqliteStore

if TYPE_CHECKING:
    from google.adk.events import Event
    from google.adk.sessions import Session

_NAMED = re.compile(rf"{OURS}-guard-(\d{{1,15}})")
# How often a row is changed anew because somebody was faster.
ATTEMPTS = 5
NAMES_A_CALL = 500
# Events of ours are these; in a session of ours only, which goes away again.
AUTHOR, INVOCATION = "migration", "tenant-migration"
# A day of 2023 and its microseconds, which a service keeps or not.
CREATED, WRITTEN = 1_700_000_000.123456, 1_700_000_100.654321


@dataclass(frozen=True)
class Row:
    """The guard as a session's state has it."""

    move: int
    claim: int
    mover: bool
    agents: bool
    # When it was taken, by the clock of the worker that did.
    taken_at: float
    # The handle that took it was closed in good order: nothing of it runs any more.
    released: bool
    # What the service keeps of what it is given, as tried in the preparation.
    kept: tuple[bool, ...] = tuple(Kept())
    # Whether the service's lists show states.
    lists_states: bool = True

    @property
    def guard(self) -> Guard:
        return Guard(self.move, self.claim, self.mover, self.agents)


class ServiceGuard(ServiceLink):
    """The guard of one tenant in one service."""

    _row: Row | None = None
    # Taken by this handle, for writing: to be released at its end.
    _holds = False
    # What the service keeps and whether its lists show states; so far, all of it.
    kept = Kept()
    lists_states = True
    _proven = False

    def begin(self) -> None:
        """Read the guard, which says what the service keeps."""
        # Without a tenant (the guards of several are asked for) there is nothing to read yet.
        if self.app_name:
            self.run(self._read())
            self.check_version()
        if self._row is not None:
            self._know(Kept(*self._row.kept), self._row.lists_states)

    def _know(self, kept: Kept, lists_states: bool) -> None:
        self.kept, self.lists_states, self._proven = kept, lists_states, True

    def close(self) -> None:
        """Say that nothing of this handle runs any more, close the service, end the loop."""
        if self._holds and self.loop.quiet():
            with suppress(StoreRefused, Overtaken):
                self._change(lambda row: replace(self._mine(row), released=True))
        super().close()

    # --- looking ---------------------------------------------------------------------------

    def guard(self) -> Guard | None:
        """Return the tenant's guard; None if there is none."""
        row = self.run(self._read())
        return row.guard if row else None

    def guards(self, among: Collection[str] = ()) -> dict[str, Guard]:
        """Return the guards of these tenants, by app name: a service can't list its tenants."""

        async def one(app: str) -> Row | None:
            rows = await self._rows(app)
            return rows[-1][1] if rows else None

        names = sorted({app for app in (*among, self.app_name) if app})
        guards: dict[str, Guard] = {}
        # Some at a time: a call of a handle has its bound.
        for at in range(0, len(names), NAMES_A_CALL):
            asked = names[at : at + NAMES_A_CALL]
            found = self.run(self.all([lambda app=app: one(app) for app in asked]))  # type: ignore[misc]
            guards |= {app: row.guard for app, row in zip(asked, found, strict=True) if row}
        return guards

    async def _rows(self, app: str) -> list[tuple[int, Row]]:
        """Return the numbered rows, the one that counts last."""
        listed = await self.service.list_sessions(app_name=app, user_id=OURS)
        found = []
        for session in listed.sessions:
            if match := _NAMED.fullmatch(session.id):
                state = session.state
                if "move" not in state:
                    # A service whose lists show no states.
                    whole = await self.service.get_session(
                        app_name=app, user_id=OURS, session_id=session.id
                    )
                    state = whole.state if whole else {}
                if "move" in state:
                    found.append((int(match[1]), _row(state)))
        return sorted(found, key=lambda pair: pair[0])

    async def _read(self) -> Row | None:
        rows = await self._rows(self.app_name)
        self._row = rows[-1][1] if rows else None
        return self._row

    # --- changing --------------------------------------------------------------------------

    def can_close(self) -> bool:
        """Return False: whoever opens the service writes."""
        return False

    def provision(self) -> None:
        """Find out what the service keeps, unless its guard says so. Raises CannotHold."""
        if not self._proven:
            self._know(*self.run(self._prove()))

    def adopt(self, found: Guard | None, *, mover: bool, agents: bool) -> None:
        """Make the guard this move's, if it is still what the survey `found`.

        May be repeated under the same move. (move, claim) only ever rises. Raises GuardTaken,
        Overtaken, StoreBusy.
        """

        def mine(row: Row | None) -> Row:
            if row is None:
                if found is None:
                    return self._fresh(None, mover, agents)
                refuse(None, where=self.where, move=self.move, adopting=True)
            same = found is not None and (row.move, row.claim) == (found.move, found.claim)
            ours = row.move == self.move and row.claim <= self.claim
            if not ours and not (same and row.move < self.move):
                refuse(row.guard, where=self.where, move=self.move, adopting=True)
            return self._fresh(row, mover, agents)

        self._change(mine)
        self._holds = mover

    def take(self, *, mover: bool, agents: bool) -> None:
        """Set claim and flags. Raises Overtaken, GuardTaken.

        Raises StoreBusy, with the time to wait, while a worker of an earlier claim that did not
        say its end may still write.
        """

        def mine(row: Row | None) -> Row:
            if row is None or row.move != self.move or row.claim > self.claim:
                refuse(row.guard if row else None, where=self.where, move=self.move, adopting=False)
            return self._fresh(row, mover, agents)

        self._change(mine)
        self._holds = mover

    def disown(self) -> None:
        """Take the guard away, where it is this claim's, and before it what no call deletes.

        A service's calls null keys of shared state and leave its rows; where a database of a
        known kind is beneath, they go there.
        """
        self.run(self.check())
        if (beneath := self._beneath()) is not None:
            try:
                beneath.drop_states()
            finally:
                beneath.close()

        async def end() -> None:
            # The row that counts goes last.
            for number, _ in await self._rows(self.app_name):
                await self.drop(OURS, f"{OURS}-guard-{number}")

        self.run(end())
        self._holds = False

    def _fresh(self, row: Row | None, mover: bool, agents: bool) -> Row:
        """Return the row of this claim, once nobody of an earlier one can write any more."""
        mine = row is not None and (row.move, row.claim) == (self.move, self.claim)
        if row is not None and row.mover and not row.released and not mine:
            left = row.taken_at + settings.DURABLE_STEP_SECONDS - time.time()
            # A clock that is ahead of ours must not stop the move.
            if left := min(max(left, 0.0), settings.DURABLE_STEP_SECONDS):
                busy = StoreBusy(
                    f"{self.where} may still be written by a worker of mv-{row.move}, claim"
                    f" {row.claim}. It is killed within {left:.0f} s; then this goes on."
                )
                busy.retry_after_seconds = left
                raise busy
        return Row(
            self.move,
            self.claim,
            mover,
            agents,
            taken_at=time.time(),
            released=not mover,
            kept=tuple(self.kept),
            lists_states=self.lists_states,
        )

    def _mine(self, row: Row | None) -> Row:
        """Return the row if it is still this claim's and lets it write; raises Overtaken."""
        if row is None or row.guard[:3] != (self.move, self.claim, True):
            raise Overtaken(
                f"the guard in {self.where} is not mv-{self.move}'s, claim {self.claim}"
            )
        return row

    def _change(self, decide: Callable[[Row | None], Row]) -> None:
        """Put the row that `decide` makes of the present one in its place. Raises StoreBusy."""
        for _ in range(ATTEMPTS):
            rows = self.run(self._rows(self.app_name))
            number, self._row = rows[-1] if rows else (0, None)
            row = decide(self._row)
            if self.run(self._put(number + 1, row)):
                self._row = row
                return
        raise StoreBusy(f"{self.where} is busy: others change its guard. It is tried again.")

    async def _put(self, number: int, row: Row) -> bool:
        """Make the row of this number; return whether it counts now."""
        if not await self._create(f"{OURS}-guard-{number}", asdict(row)):
            return False
        rows = await self._rows(self.app_name)
        if not rows or rows[-1][0] != number:
            # Made where somebody had gone on and taken the lower numbers away.
            return False
        for older, _ in rows[:-1]:
            with suppress(Exception):
                # What stays of them is lower, and goes with the next.
                await self.drop(OURS, f"{OURS}-guard-{older}")
        return True

    async def _create(self, name: str, state: dict[str, Any]) -> bool:
        from google.adk.errors.already_exists_error import AlreadyExistsError

        try:
            await self.service.create_session(
                app_name=self.app_name, user_id=OURS, session_id=name, state=state
            )
        except AlreadyExistsError:
            return False
        return True

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Run the body if the guard is this claim's; what it writes looks again, each time."""
        self.run(self.check())
        yield

    async def check(self) -> None:
        """Raise Overtaken unless the guard is this claim's and lets it write."""
        self._mine(await self._read())

    def older_writers(self) -> list[str]:
        """Return nothing: a service tells nobody who is connected."""
        return []

    def still_writing(self, tokens: Sequence[str]) -> list[str]:
        """Return nothing, as `older_writers`."""
        return []

    # --- one place under two addresses -----------------------------------------------------

    def write_nonce(self, nonce: str) -> None:
        """Leave a random word, to be looked for through the other store."""
        self.run(self._create(nonce_id(nonce), {}))

    def has_nonce(self, nonce: str) -> bool:
        """Whether that word is here: as a service leaves it, or in the database's table of words.

        The second is what a store of kind adk-sql on the same database would have written.
        """
        if self.run(self.get(OURS, nonce_id(nonce), events=False)) is not None:
            return True
        beneath = self._beneath()
        if beneath is None:
            return False
        try:
            return beneath.has_nonce(nonce)
        finally:
            beneath.close()

    def clear_nonce(self, nonce: str) -> None:
        """Take the word away; nothing happens if it is gone."""
        self.run(self.drop(OURS, nonce_id(nonce)))

    def _beneath(self) -> PostgresStore | SqliteStore | None:
        """Open the database itself, where it is one that a store of another kind can be on."""
        named: dict[str, Any] = {
            "reference": self.where,
            "app_name": self.app_name,
            "move": self.move,
            "claim": self.claim,
        }
        if self.layout is Layout.SERVICE_ADK_SQLITE:
            path = os.path.abspath(self.service._db_path)  # type: ignore[attr-defined]
            return AdkSqliteStore(address.Sqlite(path), **named)
        if self.layout is Layout.SERVICE_SQLITE:
            path = os.path.abspath(engine(self.service).url.database or "")
            return SqliteStore(address.Sqlite(path), **named)
        if self.layout is Layout.SERVICE_POSTGRESQL:
            url = engine(self.service).url.render_as_string(hide_password=False)
            found = address.parse(url, self.where)
            assert isinstance(found, address.Postgres)
            return PostgresStore(found, **named)
        return None

    # --- what it keeps ---------------------------------------------------------------------

    def folds_case(self) -> bool:
        """Whether ids that differ by case only are one there, as MySQL has it; leaves nothing."""
        name = nonce_id(f"aA{secrets.token_hex(8)}")

        async def look() -> bool:
            await self._create(name, {})
            try:
                # Not by `get`, which takes none but the very name.
                found = await self.service.get_session(
                    app_name=self.app_name, user_id=OURS, session_id=name.swapcase()
                )
                return found is not None
            finally:
                await self.drop(OURS, name)

        return self.run(look())

    def keeps_ids(self) -> bool:
        """Whether a scratch session keeps the id it is given; leaves nothing."""
        self.provision()
        return self.kept.session_ids

    async def _prove(self) -> tuple[Kept, bool]:
        """Write a scratch session with an event, read it back, remove it."""
        from google.adk.platform import time as platform_time

        name = f"{SCRATCH}-{secrets.token_hex(4)}"
        event = _trial_event()
        sent = event.model_dump(exclude={"id", "timestamp"}, exclude_none=True, mode="json")
        # This coroutine is a task, and the provider a variable of its context alone.
        platform_time.set_time_provider(lambda: CREATED)
        made = await self.service.create_session(
            app_name=self.app_name, user_id=OURS, session_id=name, state={"own": 1}
        )
        try:
            born = await self._as_made(made)
            await self.service.append_event(made, event)
            found = await self._as_made(made)
            listed = (
                await self.service.list_sessions(app_name=self.app_name, user_id=OURS)
            ).sessions
        finally:
            platform_time.reset_time_provider()
            await self.service.delete_session(
                app_name=self.app_name, user_id=OURS, session_id=made.id
            )
        events = [
            one.model_dump(exclude={"id", "timestamp"}, exclude_none=True, mode="json")
            for one in found.events
        ]
        state = {key: found.state.get(key) for key in ("own", "list")}
        if events != [sent] or state != {"own": 1, "list": [1]}:
            raise CannotHold(
                f"{self.where} does not give back an event as it was given one: what it holds of a"
                " session could not be proven. Choose another store."
            )
        kept = Kept(
            session_ids=(found.user_id, found.id) == (OURS, name),
            event_ids=found.events[0].id == event.id,
            event_times=_near(found.events[0].timestamp, WRITTEN),
            session_times=_near(born.last_update_time, CREATED)
            and _near(found.last_update_time, WRITTEN),
        )
        shown = [one for one in listed if one.id == made.id]
        return kept, bool(shown) and shown[0].state.get("own") == 1

    async def _as_made(self, made: Session) -> Session:
        found = await self.service.get_session(
            app_name=self.app_name, user_id=OURS, session_id=made.id
        )
        if found is None:
            raise CannotHold(f"{self.where} does not find a session that it has just made.")
        return found


def _trial_event() -> Event:
    from google.adk.events import Event

    return Event.model_validate(
        {
            "id": f"{SCRATCH}-event",
            "invocation_id": INVOCATION,
            "author": AUTHOR,
            "timestamp": WRITTEN,
            "content": {"role": "user", "parts": [{"text": "trial"}]},
            "actions": {"state_delta": {"list": [1], "nothing": None}},
            "custom_metadata": {"some": {"deep": [1.5, None]}},
        }
    )


def _near(one: float, other: float) -> bool:
    """Whether two times are of one microsecond."""
    return abs(one - other) < 0.6e-6


def _row(state: Any) -> Row:
    names = Row.__dataclass_fields__
    known = {name: value for name, value in state.items() if name in names}
    return Row(**{**known, "kept": tuple(known.get("kept", Kept()))})

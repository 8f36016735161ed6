"""A tenant's side of any google-adk session service, read and written through its interface.

The interface has no pages, no transactions and no way to list users without sessions. So the
heads of all of a tenant's sessions (their states, not their events) are in memory at once, which
is what `list_sessions` returns; events are there for a few sessions at a time. Sessions are
written one by one: deleted, created with their own state, their events appended in order.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from migrations_app.domain import canonical, values
from migrations_app.domain.canonical import EventRow, SessionRow
from migrations_app.domain.values import OURS, SCRATCH, Layout
from migrations_app.ports import mixed, service_values
from migrations_app.ports.base import (
    START,
    CannotHold,
    Change,
    Counts,
    Digest,
    Key,
    Mark,
    Own,
    Refusal,
    SharedRow,
    Stamp,
    StoreFailed,
    Survey,
    shared_key,
)
from migrations_app.ports.mixed import Whole
from migrations_app.ports.service_guard import AUTHOR, INVOCATION, ServiceGuard

if TYPE_CHECKING:
    from google.adk.sessions import Session

# Asked for by name up to here; for more the list is read.
FEW = 20
# Users whose states are asked for in one call of a handle, which has its bound.
USERS_A_CALL = 500
# So long sessions are read for who set a key last (seconds): a split's fence waits for it.
LOOK_SECONDS = 4.0
# A session that is written or read anew because somebody else wrote it meanwhile.
ATTEMPTS = 3
T = TypeVar("T")


class ServiceStore(ServiceGuard):
    """One tenant's side of one service."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._heads: list[tuple[Key, Session]] | None = None
        # Sessions read whole, for as long as a snapshot lasts.
        self._seen: dict[Key, Session | None] | None = None
        super().__init__(*args, **kwargs)

    # --- looking ---------------------------------------------------------------------------

    def survey(self) -> Survey:
        """Say what the store is and holds; changes nothing."""
        from migrations_app.ports.service_survey import survey

        return survey(self)

    def counts(self) -> Counts:
        """Count sessions and their users: users that have none can't be listed."""
        keys = [key for key, _ in self.heads()]
        users = len({key.user_id for key in keys})
        return Counts(len(keys), users, users)

    def heads(self) -> list[tuple[Key, Session]]:
        """Return every session of the tenant without events, in the order of the keys."""
        return self.run(self._list())

    async def _list(self) -> list[tuple[Key, Session]]:
        listed = (await self.service.list_sessions(app_name=self.app_name)).sessions
        # Each once: one that changes while a service reads its pages may be on two of them.
        found = {
            Key(session.user_id, session.id): session
            for session in listed
            if not values.is_ours(session.user_id, session.id)
        }
        return sorted(found.items(), key=lambda pair: pair[0])

    def page(self, after: Key, limit: int) -> list[tuple[Key, Stamp]]:
        """Return up to `limit` sessions behind `after`, in the order of their names.

        A walk goes over the list that its first page has read: there are no pages to ask for.
        """
        if after == START or self._heads is None:
            self._heads = self.heads()
        behind = [pair for pair in self._heads if pair[0] > after][:limit]
        return [(key, self.stamp(session)) for key, session in behind]

    def stamp(self, session: Session) -> Stamp:
        """Make a stamp: the session's time and a digest of its own state.

        An event that comes at an equal time and changes no state is invisible, and so is an
        edit in place.
        """
        if not self.lists_states:
            return repr(session.last_update_time)
        text = service_values.state_text(service_values.own_state(session))
        return f"{session.last_update_time!r}/{canonical.state_digest(text)[:32]}"

    def stamps(self, keys: Collection[Key]) -> dict[Key, Stamp]:
        """Return the stamps of those sessions that exist."""
        if len(keys) > FEW:
            heads = dict(self.heads())
            return {key: self.stamp(heads[key]) for key in keys if key in heads}
        found = self.run(self.all([lambda key=key: self.get(*key, events=False) for key in keys]))  # type: ignore[misc]
        return {
            key: self.stamp(head) for key, head in zip(keys, found, strict=True) if head is not None
        }

    def digests(self, keys: Collection[Key]) -> dict[Key, Digest]:
        """Return canonical digests: between services, too, no other are compared."""
        return mixed.digests(self, keys, self)

    def session(self, key: Key) -> Mapping[str, Any] | None:
        """Return one session as plain data, events in the service's order."""
        return mixed.session(self, key, self)

    def mark(self) -> str:
        """Return the `Mark` of every stamp and all shared state, as they are listed now."""
        total = Mark()
        heads = self.heads()
        for key, session in heads:
            total.session(key, self.stamp(session))
        total.shared(self._rows_of([None, *_users(heads)]).values())
        return str(total)

    # --- state that sessions share ---------------------------------------------------------

    def shared_page(self, after: str | None, limit: int) -> list[SharedRow]:
        """Return shared state, the app's first (after None), then users with sessions, in order.

        A state of which nothing but nulls is left counts as none where no session is either: no
        key can be deleted.
        """
        users = _users(self.heads())
        rows = []
        if after is None:
            rows = [
                row
                for row in self._rows_of([None]).values()
                if users or any(value is not None for value in canonical.loads(row.state).values())
            ]
        # "" stands for the app's row.
        behind = [user for user in users if not after or user > after]
        return rows + list(self._rows_of(behind[: limit - len(rows)]).values())

    def shared(self, user_ids: Collection[str | None]) -> dict[str | None, SharedRow]:
        """Return the shared state of these users; None asks for the app's.

        Whoever has neither a key nor a session is absent.
        """
        if not user_ids:
            return {}
        users = set(_users(self.heads()))
        return {
            user: row
            for user, row in self._rows_of(user_ids).items()
            if row.state != "{}" or (users if user is None else user in users)
        }

    def _rows_of(self, user_ids: Collection[str | None]) -> dict[str | None, SharedRow]:
        found: dict[str | None, SharedRow] = {}
        asked = list(user_ids)
        for at in range(0, len(asked), USERS_A_CALL):
            users = asked[at : at + USERS_A_CALL]
            states = self.run(self._states(users))
            found |= {
                user: shared_row(user, state) for user, state in zip(users, states, strict=True)
            }
        return found

    async def _states(self, user_ids: Sequence[str | None]) -> list[dict[str, Any]]:
        return await self.all([lambda user=user: self._state(user) for user in user_ids])  # type: ignore[misc]

    async def _state(self, user: str | None) -> dict[str, Any]:
        if user is None:
            return await self._app_state()
        try:
            state = await self.service.get_user_state(app_name=self.app_name, user_id=user)
        except NotImplementedError:
            # Any session of the user shows it, merged with its own.
            return await self._shown(user, "user:")
        return dict(state)

    async def _app_state(self) -> dict[str, Any]:
        """Read the app's state where it shows: merged into a session, ours before a tenant's.

        Ours has no state of its own that could be taken for it.
        """
        return await self._shown(OURS, "app:") or await self._shown(None, "app:")

    async def _shown(self, user: str | None, prefix: str) -> dict[str, Any]:
        listed = await self.service.list_sessions(app_name=self.app_name, user_id=user)
        for session in listed.sessions[-1:]:
            found = await self.get(session.user_id, session.id, events=False)
            return service_values.scoped_state(found, prefix) if found else {}
        return {}

    def last_changes(
        self, user_id: str | None, keys: Collection[str], own: Own
    ) -> dict[str, Change]:
        """Return the last event that set each of these keys of shared state, where one is found.

        Sessions are read from the youngest on, until none that follows can hold a younger event,
        or for LOOK_SECONDS: no call tells which session set a key.
        """
        named = {shared_key(user_id, key): key for key in keys}
        latest: dict[str, Change] = {}
        if not named:
            return latest
        until = time.monotonic() + LOOK_SECONDS
        heads = [pair for pair in self.heads() if user_id in (None, pair[0].user_id)]
        counts = set(own({key for key, _ in heads}))
        heads = [pair for pair in heads if pair[0] in counts]
        heads.sort(key=lambda pair: pair[1].last_update_time, reverse=True)
        at = {key: canonical.micros_of_seconds(head.last_update_time) for key, head in heads}
        for bite in self.bites([key for key, _ in heads]):
            oldest = min((change.at for change in latest.values()), default=0)
            if len(latest) == len(named) and oldest > (at[bite[0]] or 0):
                break
            for _, session in self.whole(bite):
                for event in session.events:
                    micros = canonical.micros_of_seconds(event.timestamp)
                    if micros is not None:
                        _note_changes(latest, named, event.actions.state_delta, micros)
            if time.monotonic() > until:
                break
        return latest

    def write_shared(self, rows: Sequence[SharedRow]) -> None:
        """Put these states in place by value, through one event of a scratch session a user.

        A key that only the service has is nulled: the interface can't delete one.
        """
        wanted: dict[str | None, dict[str, Any]] = {}
        for row in rows:
            value = canonical.loads(row.state)
            # What is no object google-adk can't read; `write_shared` of the pair has left it out.
            wanted[row.user_id] = value if isinstance(value, dict) else {}
        self._put_shared(wanted)

    def replace_shared(self, row: SharedRow, was: str) -> bool:
        """Put one state in place if its text still is `was`; return whether it was.

        Looked at right before it is written; nothing of a service can hold it meanwhile.
        """
        now = self.shared([row.user_id]).get(row.user_id)
        if (now.state if now else "{}") != was:
            return False
        self.write_shared([row])
        return True

    def delete_shared(self, user_ids: Collection[str | None]) -> int:
        """Null every key of these users' states (None: the app's); return how many had any."""
        present = self.shared(user_ids)
        self._put_shared({user: {} for user in present})
        return len(present)

    def _put_shared(self, wanted: Mapping[str | None, Mapping[str, Any]]) -> None:
        if not wanted:
            return

        async def work() -> None:
            await self.check()
            states = await self._states(list(wanted))
            deltas = [
                (user, _delta(user, now, wanted[user]))
                for user, now in zip(wanted, states, strict=True)
            ]
            await self.all(
                [lambda u=user, d=delta: self._settle(u, d) for user, delta in deltas if delta]  # type: ignore[misc]
            )

        self.run(work())

    async def _settle(self, user_id: str | None, delta: Mapping[str, Any]) -> None:
        """Set these keys by the one event of a session that is made for it and removed."""
        from google.adk.events import Event, EventActions

        await self.check()
        user = OURS if user_id is None else user_id
        # A name of its own: that of a worker who died may still be there, hidden as this one is.
        name = f"{SCRATCH}-{secrets.token_hex(4)}"
        named: dict[str, Any] = {"app_name": self.app_name, "user_id": user}
        made = await self.service.create_session(**named, session_id=name)
        try:
            await self.service.append_event(
                made,
                Event(
                    author=AUTHOR,
                    invocation_id=INVOCATION,
                    actions=EventActions(state_delta=dict(delta)),
                ),
            )
        finally:
            await self.service.delete_session(**named, session_id=made.id)

    # --- rows for a store of another kind, and for another service ---------------------------

    def fine_times(self) -> int:
        """Count the sessions whose time is finer than a microsecond."""
        return sum(
            micros is not None and canonical.seconds_of_micros(micros) != head.last_update_time
            for micros, head in (
                (canonical.micros_of_seconds(head.last_update_time), head)
                for _, head in self.heads()
            )
        )

    def bites(self, keys: Sequence[Key]) -> Iterator[list[Key]]:
        """Split keys so that few sessions' events are in memory: nothing tells their size."""
        for at in range(0, len(keys), self.at_once):
            yield list(keys[at : at + self.at_once])

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read each session once, whole, for as long as the body runs."""
        self._seen = {}
        try:
            yield
        finally:
            self._seen = None

    def read_stamps(self, keys: Sequence[Key]) -> dict[Key, Stamp]:
        """Return the stamps of those sessions that exist, as they are read in a snapshot."""
        if self._seen is None:
            return self.stamps(keys)
        return {
            key: "" if found is _UNREADABLE else self.stamp(found)
            for key, found in self._whole(keys)
        }

    def read_sessions(self, keys: Sequence[Key]) -> Iterator[SessionRow]:
        """Yield these sessions' own rows."""
        for key, found in self._whole(keys):
            unread = found is _UNREADABLE
            yield (service_values.unreadable(*key) if unread else service_values.session_row(found))

    def read_events(self, keys: Sequence[Key]) -> Iterator[EventRow]:
        """Yield these sessions' events in the service's order."""
        for _, found in self._whole(keys):
            if found is not _UNREADABLE:
                yield from service_values.event_rows(found, self.layout)

    def whole(self, keys: Sequence[Key]) -> Iterator[tuple[Key, Session]]:
        """Yield those of these sessions that exist and can be read, with their events."""
        return (pair for pair in self._whole(keys) if pair[1] is not _UNREADABLE)

    def _whole(self, keys: Sequence[Key]) -> Iterator[tuple[Key, Any]]:
        """Yield those of these sessions that exist, read once a snapshot."""
        seen = self._seen if self._seen is not None else {}
        if missing := [key for key in keys if key not in seen]:
            read = self.run(self.all([lambda key=key: self._read_whole(key) for key in missing]))  # type: ignore[misc]
            seen.update(zip(missing, read, strict=True))
        for key in keys:
            if (found := seen[key]) is not None:
                yield key, found

    async def _read_whole(self, key: Key) -> Any:
        try:
            return await self.get(*key)
        except Exception as error:
            refusal = self.refusal(error)
            if isinstance(refusal, StoreFailed | CannotHold):
                # This one session; the others can be read.
                return _UNREADABLE
            raise

    # --- writing ---------------------------------------------------------------------------

    def delete(self, keys: Collection[Key]) -> int:
        """Delete these sessions; return how many there were."""
        return self.remove(list(keys))

    def remove(self, keys: Sequence[Key]) -> int:
        """Delete these sessions, each after a look at the guard."""

        async def one(key: Key) -> bool:
            await self.check()
            return await self.drop(*key)

        return sum(self.run(self.all([lambda key=key: one(key) for key in keys])))  # type: ignore[misc]

    def delete_unchanged(self, stamps: Mapping[Key, Stamp]) -> list[Key]:
        """Delete those sessions whose stamp is still the given one; return them.

        Each is looked at right before: nothing of a service holds it for longer.
        """

        async def one(key: Key) -> bool:
            await self.check()
            head = await self.get(*key, events=False)
            if head is None or self.stamp(head) != stamps[key]:
                return False
            return await self.drop(*key)

        gone = self.run(self.all([lambda key=key: one(key) for key in stamps]))  # type: ignore[misc]
        return [key for key, went in zip(stamps, gone, strict=True) if went]

    def replay(
        self, wholes: Sequence[Whole], until: float, recognise: Callable[[EventRow], bytes]
    ) -> dict[Key, Stamp | Refusal | None]:
        """Write these sessions; return each one's stamp, read back, or why it can't be here.

        A beginning of it that is here already is gone on with: a long session takes more than one
        step may, and is None until it is through. State that others share is put back at the end,
        for replayed events set it to what it was then. `recognise` says which event of ours
        another is. Raises Overtaken.
        """
        touched = _touched(wholes)

        async def work() -> list[Stamp | Refusal | None]:
            await self.check()
            before = await self._states(touched)
            try:
                return await self.all(
                    [lambda w=whole: self._replay_one(w, until, recognise) for whole in wholes]  # type: ignore[misc]
                )
            finally:
                await self._put_back(touched, before)

        # Longer than a call: the deadline is looked at between its calls.
        done = self.run(work(), max(until - time.monotonic(), 0.0) + 5.0)
        return dict(zip([whole.key for whole in wholes], done, strict=True))

    async def _put_back(
        self, users: Sequence[str | None], before: Sequence[Mapping[str, Any]]
    ) -> None:
        """Set the keys that replayed events changed to what they were; new ones stay.

        Without this a session that is copied again, to repair it, would leave its user with
        old values, after everybody's had been settled.
        """
        after = await self._states(users)
        for user, was, now in zip(users, before, after, strict=True):
            delta = {
                shared_key(user, key): value
                for key, value in was.items()
                if key not in now or not _same(value, now[key])
            }
            if delta:
                await self._settle(user, delta)

    async def _replay_one(
        self, whole: Whole, until: float, recognise: Callable[[EventRow], bytes]
    ) -> Stamp | Refusal | None:
        from google.adk.errors._stale_session_error import StaleSessionError
        from google.adk.errors.already_exists_error import AlreadyExistsError
        from google.adk.errors.session_not_found_error import SessionNotFoundError

        again = (StaleSessionError, AlreadyExistsError, SessionNotFoundError)
        tries = 0
        while True:
            tries += 1
            try:
                return await self._write(whole, until, recognise, anew=tries > 1)
            except Exception as error:
                # Somebody else wrote it meanwhile: it is done again from its deletion on.
                if isinstance(error, again) and tries < ATTEMPTS:
                    continue
                refusal = self.refusal(error)
                if not isinstance(refusal, StoreFailed | CannotHold):
                    raise
                return await self._refused(whole, error)

    async def _refused(self, whole: Whole, error: Exception) -> Refusal:
        """Leave the session out whole; say by which value of it, where one is known to be odd."""
        await self.drop(*whole.key)
        words = f"the service refused it: {type(error).__name__}"
        for found in self._odd(whole):
            return Refusal(f"{found.field} {found.path}".strip(), f"{found.odd}: {words}")
        return Refusal("sessions", words)

    def _odd(self, whole: Whole) -> Iterator[values.Found]:
        yield from values.in_session(whole.session)
        for row in whole.events:
            yield from values.in_event(row)

    async def _write(
        self,
        whole: Whole,
        until: float,
        recognise: Callable[[EventRow], bytes],
        *,
        anew: bool,
    ) -> Stamp | Refusal | None:
        await self.check()
        if time.monotonic() > until:
            return None
        own = _own(whole.session)
        order = self._order(whole)
        there: Any = None if anew else await self._read_whole(whole.key)
        done = None
        if there is not None and there is not _UNREADABLE:
            done = self._begun(there, whole, order, own, recognise)
        if done is None:
            with suppress(Exception):
                # As the article has it: what is not there needs no deleting.
                await self.drop(*whole.key)
            there, done = await self._create_at(whole, own), 0
            if (there.user_id, there.id) != whole.key:
                await self.service.delete_session(
                    app_name=self.app_name, user_id=there.user_id, session_id=there.id
                )
                return Refusal("sessions.id", "the service gives the session another id")
        for at in order[done:]:
            if time.monotonic() > until:
                return None
            # The object that it gave is up to date with each append.
            await self.service.append_event(there, service_values.event_of(whole.events[at]))
        head = await self.get(*whole.key, events=False)
        if head is None:
            raise CannotHold(f"{self.where} has lost a session that was just written.")
        return self.stamp(head)

    async def _create_at(self, whole: Whole, own: Mapping[str, Any]) -> Session:
        """Create the session as of its time, which stays its own where no event follows."""
        from google.adk.platform import time as platform_time

        micros = whole.session.update_time if not whole.events else whole.session.create_time
        at = canonical.seconds_of_micros(micros or 0)

        async def create() -> Session:
            # A task has a context of its own, and the provider is a variable of it.
            platform_time.set_time_provider(lambda: at)
            return await self.service.create_session(
                app_name=self.app_name,
                user_id=whole.key.user_id,
                session_id=whole.key.session_id,
                state=dict(own),
            )

        return await asyncio.create_task(create())

    def _order(self, whole: Whole) -> list[int]:
        """Return in which order to append: the one that gave the session its time comes last.

        Clocks go back. Where events are read by their times, the last one that was appended may
        stand anywhere; its time is the session's, and its state won.
        """
        order = list(range(len(whole.events)))
        if self.layout is Layout.SERVICE:
            # Read in the order of writing.
            return order
        at = [n for n in order if whole.events[n].timestamp == whole.session.update_time]
        if at:
            order.remove(at[-1])
            order.append(at[-1])
        return order

    def _begun(
        self,
        there: Session,
        whole: Whole,
        order: Sequence[int],
        own: Mapping[str, Any],
        recognise: Callable[[EventRow], bytes],
    ) -> int | None:
        """Return how many events of the copy are there, if going on with them leads to the end."""
        rows = list(service_values.event_rows(there, self.layout))
        done = len(rows)
        first = Counter(whole.digests[at] for at in order[:done])
        if done > len(order) or Counter(map(recognise, rows)) != first:
            return None
        state = service_values.own_state(there)
        for at in order[done:]:
            delta = service_values.event_of(whole.events[at]).actions.state_delta
            state.update({k: v for k, v in delta.items() if not values.is_scoped(k)})
        if not _same(state, own):
            return None
        if done == len(order):
            micros = canonical.micros_of_seconds(there.last_update_time)
            return done if micros == whole.session.update_time else None
        return done


_UNREADABLE: Any = object()


def _own(row: SessionRow) -> dict[str, Any]:
    """Return a session's own state, as it may be given to create_session."""
    state = canonical.loads(row.state)
    return {key: value for key, value in state.items() if not values.is_scoped(key)}


def _touched(wholes: Sequence[Whole]) -> list[str | None]:
    """Return whose shared state these sessions' events may set; None: the app's."""
    users, app = set(), False
    for whole in wholes:
        for row in whole.events:
            text = row.event_data or ""
            app = app or '"app:' in text
            if '"user:' in text:
                users.add(whole.key.user_id)
    return [*([None] if app else []), *sorted(users)]


def _note_changes(
    latest: dict[str, Change], named: Mapping[str, str], delta: Mapping[str, Any], micros: int
) -> None:
    """Put into `latest` the keys that an event of this time has set, unless a younger one has."""
    for name in named.keys() & delta.keys():
        key = named[name]
        if key not in latest or latest[key].at <= micros:
            value = canonical.loads(service_values.state_text({"": delta[name]}))[""]
            latest[key] = Change(micros, canonical.value_digest(value))


def _users(heads: Sequence[tuple[Key, Session]]) -> list[str]:
    return sorted({key.user_id for key, _ in heads})


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal as JSON: 1, 1.0 and True are not."""
    texts = (service_values.state_text({"": value}) for value in (one, other))
    first, second = map(canonical.of_json, texts)
    return first == second


def _delta(user: str | None, now: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an event has to set so that `now` becomes `wanted`, as far as it can."""
    sets = {
        key: value for key, value in wanted.items() if key not in now or not _same(now[key], value)
    }
    nulls = {key: None for key, value in now.items() if key not in wanted and value is not None}
    return {shared_key(user, key): value for key, value in {**sets, **nulls}.items()}


def shared_row(user_id: str | None, state: Mapping[str, Any]) -> SharedRow:
    """Spell shared state as a row: in one way, for services give keys in any order."""
    text = service_values.state_text(state)
    spelled = type(text)(canonical.of_json(text))
    return SharedRow(user_id, spelled, hashlib.sha256(spelled.encode()).hexdigest())

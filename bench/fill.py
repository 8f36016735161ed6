"""Fill a store with the conversations of a tenant: real Runners, one turn after another.

`python -m bench.fill --config FILE`. There is no control plane in it: this is the history
that a tenant brings along. What is stored is journalled like every client's events.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from google.adk.runners import Runner

from bench import scripted
from bench.journal import Journal, Line
from bench.noting import Noting


@dataclass(frozen=True)
class Part:
    """The history of one tenant in one store."""

    tenant: str
    app_name: str
    store: str
    url: str
    sessions: int
    turns_per_session: int
    users: int

    def pairs(self) -> list[tuple[str, str]]:
        """Return (user, session) of each conversation."""
        return [(f"u-{n % self.users:03}", f"s-{n:04}") for n in range(self.sessions)]


async def fill(part: Part, journal: Journal) -> int:
    """Hold the conversations; return how many turns were taken."""
    service = Noting(part.url, part.store, {})
    runner = scripted.build_runner(part.app_name, service)
    turns = 0
    for user, session in part.pairs():
        await service.create_session(
            app_name=part.app_name,
            user_id=user,
            session_id=session,
            state={"title": f"Question {session}"},
        )
        for _ in range(part.turns_per_session):
            turns += 1
            await _turn(part, runner, user, session, f"turn {turns}", journal)
    await runner.close()
    await service.close()
    return turns


async def _turn(
    part: Part, runner: Runner, user: str, session: str, text: str, journal: Journal
) -> None:
    invocation, count = "", 0
    async for event in runner.run_async(
        user_id=user, session_id=session, new_message=scripted.message(text)
    ):
        invocation, count = event.invocation_id, count + 1
        journal.write(
            Line(
                kind="event",
                at=time.time(),
                tenant=part.tenant,
                user=user,
                session=session,
                invocation=invocation,
                id=event.id,
                store=part.store,
                word=scripted.last_word(event),
                made=event.timestamp,
            )
        )
    journal.write(
        Line(
            kind="turn",
            at=time.time(),
            tenant=part.tenant,
            user=user,
            session=session,
            invocation=invocation,
            count=count,
        )
    )


async def _main(parts: list[Part], path: Path) -> int:
    journal = Journal(path)
    for part in parts:
        await fill(part, journal)
    journal.close()
    return 0


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--config", type=Path, required=True)
    data = json.loads(options.parse_args().config.read_text())
    parts = [Part(**part) for part in data["parts"]]
    return asyncio.run(_main(parts, Path(data["journal"])))


if __name__ == "__main__":
    sys.exit(main())

"""Who lives where in a demo or a traffic test: registered, filled, and talked to.

Import it after `django.setup()`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path

from bench.audit_events import Home, Lived
from bench.fill import Part
from bench.fleet import Config, Talk
from durable.clock import database_now
from migrations_app import services as migrations
from migrations_app.domain.phases import Mode
from migrations_app.models import TenantMigration
from platform_admin.processes import Process
from tenants import services
from tenants.domain.roles import TokenRole
from tenants.models import Cell, PlacementChange, Store, Tenant

BY = "demo"
QUOTA = 5_000_000


@dataclass(frozen=True)
class Resident:
    """One tenant, its history and its clients."""

    tenant: str
    agent: str
    # Key of the store that it lives in at first.
    store: str
    # Conversations that it brings along, two turns each unless told.
    sessions: int
    clients: int = 1
    turns_per_session: int = 2
    weight: float = 1.0

    @property
    def app_name(self) -> str:
        return f"{self.agent}.{self.tenant}"


@dataclass(frozen=True)
class Tokens:
    """What agent processes and their clients sign in with."""

    runtime: str
    gateway: str


@dataclass(frozen=True)
class Scene:
    """A region with one cell a store, and its residents."""

    # Where configurations and journals are kept.
    home: Path
    # Store key -> URL as agents have it.
    stores: Mapping[str, str]
    # Store key -> the cell of its residents.
    cells: Mapping[str, str]
    residents: tuple[Resident, ...]

    @property
    def environment(self) -> dict[str, str]:
        """The variables that hold the stores' addresses, for web and workers."""
        return {_variable(key): url for key, url in self.stores.items()}

    @property
    def journals(self) -> list[Path]:
        return sorted((self.home / "journal").glob("*.jsonl"))

    @property
    def turns(self) -> int:
        """How many turns the filling takes."""
        return sum(part.sessions * part.turns_per_session for part in self._parts())

    def onboard(self, *, now: datetime) -> Tokens:
        """Register everybody, by the services that people use."""
        region = services.add_region("eu1", name="Europe 1", by=BY, now=now)
        cells, stores = {}, {}
        for key, slug in self.cells.items():
            cell = services.add_cell(
                slug, region=region, quota_tokens_per_minute=QUOTA, by=BY, now=now
            )
            cells[key] = services.verify_quota(cell, tokens_per_minute=QUOTA, by=BY, now=now)
            stores[key] = services.add_store(
                key,
                region=region,
                kind="adk-sql",
                address_from=f"env:{_variable(key)}",
                by=BY,
                now=now,
            )
        for resident in self.residents:
            services.add_tenant(
                resident.tenant,
                name=resident.tenant.title(),
                app_name=resident.app_name,
                cell=cells[resident.store],
                store=stores[resident.store],
                weight=resident.weight,
                by=BY,
                now=now,
            )
        until = now + timedelta(days=1)
        _, runtime = services.make_token(
            "agents",
            role=TokenRole.RUNTIME,
            cells=list(cells.values()),
            expires_at=until,
            by=BY,
            now=now,
        )
        _, gateway = services.make_token(
            "gateway", role=TokenRole.GATEWAY, expires_at=until, by=BY, now=now
        )
        return Tokens(runtime=runtime, gateway=gateway)

    def fills(self) -> list[Process]:
        """Return a filling process for each store: SQLite has one writer a file."""
        made = []
        for store in self.stores:
            name = f"fill-{store}"
            parts = [asdict(part) for part in self._parts() if part.store == store]
            journal = self.home / "journal" / f"{name}.jsonl"
            config = self.home / f"{name}.json"
            config.write_text(json.dumps({"journal": str(journal), "parts": parts}))
            command = [sys.executable, "-m", "bench.fill", "--config", str(config)]
            made.append(Process(name, command, forever=False))
        return made

    def fleets(
        self,
        names: tuple[str, ...],
        *,
        address: str,
        tokens: Tokens,
        think_seconds: float,
        turns: int | None = None,
        longest_turn_seconds: float = 30.0,
        born: int = 5,
    ) -> list[Process]:
        """Return agent processes, each an instance of every cell with clients of every tenant.

        A conversation has one client for good, so its journal is in order. With `turns` each
        process ends after so many. `born` conversations in 100 turns are new.
        """
        made = []
        for number, name in enumerate(names):
            talks = tuple(
                Talk(
                    tenant=resident.tenant,
                    clients=resident.clients,
                    known=tuple(part.pairs()[number :: len(names)]),
                )
                for resident, part in zip(self.residents, self._parts(), strict=True)
            )
            config = Config(
                name=name,
                url=address,
                runtime_token=tokens.runtime,
                gateway_token=tokens.gateway,
                cells=tuple(self.cells.values()),
                stores=dict(self.stores),
                journal=str(self.home / "journal" / f"{name}.jsonl"),
                talks=talks,
                think_seconds=think_seconds,
                turns=turns,
                longest_turn_seconds=longest_turn_seconds,
                born=born,
                # One hears of a placement long after another: the cells have to refuse it.
                placement_seconds=0.5 + 2.5 * number,
                seed=number,
            )
            path = self.home / f"{name}.json"
            config.save(path)
            command = [sys.executable, "-m", "bench.fleet", "--config", str(path)]
            made.append(Process(name, command, forever=turns is None))
        return made

    def homes(self) -> dict[str, Home]:
        """Return where each tenant lives by now."""
        return {
            tenant.slug: Home(tenant.app_name, self.stores[tenant.placement.store.key])
            for tenant in Tenant.objects.select_related("placement__store")
        }

    def lived(self) -> dict[str, list[Lived]]:
        """Return, by tenant, the stores in which it has lived, in order.

        A split keeps it where it is, and so does its end there. In between sessions began at the
        other store: those that come back have lived there first.
        """
        flips = TenantMigration.objects.values_list("back_placement_version", flat=True)
        ended = set(flips.exclude(back_placement_version=None))
        found: dict[str, list[Lived]] = {}
        changes = PlacementChange.objects.order_by("id")
        for tenant, version, key in changes.values_list(
            "tenant__slug", "placement_version", "store__key"
        ):
            places = found.setdefault(tenant, [])
            if places and places[-1].store == key and version not in ended:
                places.append(Lived(next(one for one in self.stores if one != key), births=True))
            places.append(Lived(key))
        return found

    def note_homes(self) -> Path:
        """Write down what `bench.audit_events` has to know of the tenants; return where."""
        path, lived = self.home / "homes.json", self.lived()
        known = {
            tenant: [home.app_name, home.url, lived.get(tenant, [])]
            for tenant, home in self.homes().items()
        }
        new = path.with_suffix(".new")
        # It holds addresses.
        new.touch(mode=0o600)
        new.write_text(json.dumps(known))
        new.rename(path)
        return path

    def _parts(self) -> list[Part]:
        return [
            Part(
                tenant=resident.tenant,
                app_name=resident.app_name,
                store=resident.store,
                url=self.stores[resident.store],
                sessions=resident.sessions,
                turns_per_session=resident.turns_per_session,
                users=max(1, resident.sessions // 3),
            )
            for resident in self.residents
        ]


def start_move(
    tenant: str,
    *,
    cell: str,
    store: str,
    by: str,
    reason: str,
    soak_seconds: float,
    pace_per_second: float,
    mode: Mode = Mode.FENCE,
    idle_seconds: float = 0.0,
    idle_bound_seconds: float = 0.0,
) -> TenantMigration:
    """Start a move that runs to its end by itself.

    In split mode known sessions are waited for until none has changed for `idle_seconds`,
    `idle_bound_seconds` at most.
    """
    return migrations.start(
        Tenant.objects.get(slug=tenant),
        target_cell=Cell.objects.get(slug=cell),
        target_store=Store.objects.get(key=store),
        by=by,
        reason=reason,
        now=database_now(),
        automatic=True,
        soak_seconds=soak_seconds,
        pace_per_second=pace_per_second,
        mode=mode,
        idle_seconds=idle_seconds,
        idle_bound_seconds=idle_bound_seconds,
        offboard_automatically=True,
    )


def _variable(key: str) -> str:
    return f"{key.upper().replace('-', '_')}_URL"

"""`manage.py member`: let a person see one tenant's usage, or no longer. Audited."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandError, CommandParser

from durable.clock import database_now
from durable.errors import Refused
from tenants import services
from tenants.management.commands.role import BY
from tenants.models import Tenant


class Command(BaseCommand):
    help = "Let a person see one tenant's usage. With --new: make their sign-in first."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", metavar="NAME")
        parser.add_argument("tenant", metavar="TENANT", help="its slug")
        parser.add_argument("--by", required=True, metavar="WHO", help="who you are, for the audit")
        what = parser.add_mutually_exclusive_group()
        # Never by itself: a slip in a name would make somebody.
        what.add_argument("--new", action="store_true", help="make the sign-in NAME")
        what.add_argument("--remove", action="store_true", help="they see it no longer")

    def handle(
        self,
        *args: Any,
        name: str,
        tenant: str,
        by: str,
        new: bool,
        remove: bool,
        **options: Any,
    ) -> None:
        who = BY.format(by[: services.WHO_MAX - len(BY)])
        found = Tenant.objects.filter(slug=tenant).first()
        if found is None:
            raise CommandError(f"There is no tenant {tenant}. Check the slug.")
        try:
            self.stdout.write(self._done(name, found, who, new=new, remove=remove))
        except Refused as refused:
            raise CommandError(str(refused)) from refused

    def _done(self, name: str, tenant: Tenant, who: str, *, new: bool, remove: bool) -> str:
        said: dict[str, Any] = {"tenant": tenant, "by": who, "now": database_now()}
        if new:
            _, password = services.add_member_sign_in(name, **said)
            return (
                f"{name} sees the usage of {tenant} now, password {password} (shown this once; to "
                f"choose another: manage.py changepassword {name})"
            )
        user = User.objects.filter(username=name).first()
        if user is None:
            raise CommandError(
                f"There is no sign-in {name}. Check the name, or make one with --new."
            )
        if remove:
            services.remove_member(user, **said)
            return f"{name} sees the usage of {tenant} no longer."
        services.add_member(user, **said)
        return f"{name} sees the usage of {tenant} now."

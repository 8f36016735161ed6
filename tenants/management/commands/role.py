"""`manage.py role`: give a person a role, and a sign-in if they have none yet. Audited."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandError, CommandParser

from durable.clock import database_now
from durable.errors import Refused
from tenants import services
from tenants.domain.roles import Role

BY = "{} (command)"


class Command(BaseCommand):
    help = "Give a person one role, or none. With --new: make their sign-in first."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", metavar="NAME")
        parser.add_argument("role", choices=[*(role.value for role in Role), "none"])
        parser.add_argument("--by", required=True, metavar="WHO", help="who you are, for the audit")
        # Never by itself: a slip in a name would make somebody.
        parser.add_argument("--new", action="store_true", help="make the sign-in NAME")

    def handle(self, *args: Any, name: str, role: str, by: str, new: bool, **options: Any) -> None:
        who = BY.format(by[: services.WHO_MAX - len(BY)])
        given = None if role == "none" else Role(role)
        now = database_now()
        if new:
            if given is None:
                raise CommandError("A new sign-in without a role opens nothing. Give it one.")
            try:
                _, password = services.add_sign_in(name, role=given, by=who, now=now)
            except Refused as refused:
                raise CommandError(str(refused)) from refused
            self.stdout.write(
                f"{name} is {given} now, password {password} (shown this once; to choose another: "
                f"manage.py changepassword {name})"
            )
            return
        user = User.objects.filter(username=name).first()
        if user is None:
            raise CommandError(
                f"There is no sign-in {name}. Check the name, or make one with --new."
            )
        services.grant_role(user, given, by=who, now=now)
        self.stdout.write(f"{name} is {given} now." if given else f"{name} has no role now.")

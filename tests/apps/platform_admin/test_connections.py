"""The database goes away and comes back between two requests."""

from __future__ import annotations

import pytest
from django.db import close_old_connections, connection
from django.test import Client


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_the_first_page_after_a_restart_of_the_database_is_answered() -> None:
    client = Client()
    assert client.get("/readyz").status_code == 200
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        [pid] = cursor.fetchone()
    other = connection.copy()
    with other.cursor() as cursor:
        # As a restart does to every connection.
        cursor.execute("SELECT pg_terminate_backend(%s)", [pid])
    other.close()
    # What Django does where a request begins; its test client leaves it out.
    close_old_connections()
    assert client.get("/readyz").status_code == 200

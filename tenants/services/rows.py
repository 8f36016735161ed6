"""How rows are written here: locked in one order everywhere, inserted or refused.

Cells in id order, then the counter row, then what hangs on them, so that no two writers wait for
each other.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from django.db import IntegrityError, connection, models, transaction

from durable.errors import Refused
from tenants.models import Cell, Counter

Row = TypeVar("Row", bound=models.Model)


def lock_cells(ids: Collection[int]) -> list[Cell]:
    """Lock these cells until commit, always in id order, and return them read afresh.

    FOR NO KEY UPDATE: a join or a report, whose row names the cell, doesn't queue behind it.
    SQLite ignores row locks; there a transaction is the one writer from its start.
    """
    rows = Cell.objects.select_for_update(no_key=True).filter(pk__in=ids).order_by("pk")
    return list(rows)


def lock_counter() -> Counter:
    """Lock the counter row until commit. After the cells, never before."""
    return Counter.objects.select_for_update().get()


def assert_in_transaction() -> None:
    """Raise RuntimeError outside of a transaction: a caller forgot what this is part of."""
    if not connection.in_atomic_block:
        raise RuntimeError("This belongs into the transaction of what it is part of")


def insert(row: Row, taken: Refused) -> Row:
    """Insert the row, or raise `taken`: the unique constraint decides between two at once."""
    try:
        with transaction.atomic():
            row.save(force_insert=True)
    except IntegrityError as error:
        raise taken from error
    return row


def taken(what: str, slug: str) -> str:
    """Say that a slug or key is used, in a person's words."""
    return f"There is a {what} {slug} already. Choose another name, or use that one."

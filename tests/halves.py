"""How tests are shared out among processes that run at once (`pytest -n 2`)."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

# All of a folder in one process: two browsers, or two installations under traffic, would wait
# for each other beyond their patience.
TOGETHER = ("browser", "traffic")
# Each test for itself: a file of these would keep one process busy while the other has ended.
APART = ("faults",)


class Halves(LoadScopeScheduling):
    """A file at a time, in the order of collection; what its tests share is made once."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        folder = file.removeprefix("tests/").partition("/")[0]
        if folder in TOGETHER:
            return folder
        return nodeid if folder in APART else file

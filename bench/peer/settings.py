"""The product's settings, with the peer's addresses beside its own."""

from platform_admin.settings import *  # noqa: F403

ROOT_URLCONF = "bench.peer.urls"

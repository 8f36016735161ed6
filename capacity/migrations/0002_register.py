"""What the agents of this product share by their build, and what keeps tenants apart there."""

from django.db import migrations
from django.utils import timezone

BY = "switchyard"
# Name, kind, control, how one sees that it holds.
ROWS = [
    (
        "Model quota of a cell",
        "performance",
        "Each tenant has a rate, a number of runs at the same time and a daily budget, divided over"
        " the instances so that replicas share a limit. The largest limit plus the normal load of"
        " the others stays under 90 % of the quota, in tokens and in requests.",
        "The headroom check when limits are saved; the flood test.",
    ),
    (
        "Worker threads and event loop of an instance",
        "performance",
        "A tenant has at most its number of runs at the same time there; what is above is refused"
        " at once, nothing is queued. A bridge tenant has a pool of workers of its own.",
        "The flood test: a neighbour's p95 stays in its SLO.",
    ),
    (
        "Connections of a session store",
        "performance",
        "A turn holds one only while it reads or writes, and a tenant's turns at the same time are"
        " bounded. Bridge and silo tenants have a store of their own.",
        "The flood test, with both tenants in one store.",
    ),
    (
        "Room in the cache of Runners",
        "performance",
        "The cache is bounded in number and in idle time, one build per key at a time, and what is"
        " evicted is only the reference: a tenant that comes back waits for one build.",
        "Instances: evictions by cause, and the p99 of a build.",
    ),
    (
        "Process of an instance",
        "fault",
        "A run ends at its number of model calls and at the instance's longest turn; its permit"
        " comes back on completion, error, cancellation and an abandoned stream.",
        "The loop test; turns in flight go back to 0.",
    ),
    (
        "Model endpoint",
        "fault",
        "A circuit breaker per endpoint, and 429s told apart: the tenant's own quota, or a shared"
        " pool that is busy. A tenant's own 429s open no breaker for others.",
        "Instances: the state of each breaker.",
    ),
    (
        "Control plane",
        "fault",
        "Runtimes decide in memory, by the last policy that they applied, until their lease is"
        " out; a lost poll stops no turn. Reports are bounded in rows and in size.",
        "Instances: leases, and the version that each applied.",
    ),
    (
        "Cache of Runners",
        "authority",
        "A Runner is built for one tenant and kept by tenant, store and generation, with tools and"
        " a plugin of its own. Rotating secrets raises the generation, and leaving ends it.",
        "The authority test; rotating on a tenant's limits page.",
    ),
    (
        "Tool credentials",
        "authority",
        "Tools are made per tenant over clients that hold its own credentials; no tool and no"
        " request field takes a tenant's name. Each tenant has a list of allowed tools.",
        "The authority test: a planted instruction, and the other tenant's backend saw nothing.",
    ),
    (
        "Gateway",
        "authority",
        "The tenant is resolved once, from authenticated claims: never from a body, a path or an"
        " argument that a model could fill in.",
        "The authority test, with a forged tenant in each of them.",
    ),
    (
        "Session store",
        "data",
        "Sessions are read and written under the tenant's app name, which its Runner has from the"
        " policy; a Runner of another app name is refused before the run.",
        "The authority test; the comparison at the end of every move.",
    ),
    (
        "Artifact store",
        "data",
        "Files are kept under app name, user and session; agents reach them through their own"
        " Runner's service only.",
        "The comparison of artifacts in every move.",
    ),
    (
        "Result caches",
        "data",
        "The tenant is part of every key.",
        "The isolation run asks one question as two tenants.",
    ),
]


def seed(apps, schema_editor):
    resource = apps.get_model("capacity", "SharedResource")
    now = timezone.now()
    for name, kind, control, shown_by in ROWS:
        resource.objects.get_or_create(
            name=name,
            defaults={
                "kind": kind, "control": control, "shown_by": shown_by, "at": now, "by": BY,
            },
        )


class Migration(migrations.Migration):
    dependencies = [("capacity", "0001_initial")]
    # Backwards: people may have edited the lines; they stay until the table goes.
    operations = [migrations.RunPython(seed, migrations.RunPython.noop)]

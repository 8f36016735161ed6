"""Celery: two queues with a worker each, and the one list of periodic work.

Messages are hints. Rows say what is due, so a lost, repeated, late or reordered
message changes nothing; beat asks for due rows every second as the safety net.
"""

from __future__ import annotations

import os

from celery import Celery
from kombu import Queue
from kombu.transport import TRANSPORT_ALIASES

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "platform_admin.settings")

from django.conf import settings

app = Celery("switchyard")
TRANSPORT_ALIASES["files"] = "platform_admin.broker:Transport"

if settings.REDIS_URL:
    broker: dict[str, object] = {"broker_url": settings.REDIS_URL}
else:
    folder = settings.HOME / "broker"
    for name in ("queue", "processed", "control"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    broker = {
        "broker_url": "files://",
        # Nobody inspects these workers from afar; each would have a queue of its own for it.
        "worker_enable_remote_control": False,
        "broker_transport_options": {
            "data_folder_in": str(folder / "queue"),
            "data_folder_out": str(folder / "queue"),
            "processed_folder": str(folder / "processed"),
            "control_folder": str(folder / "control"),
            # Seconds between looks at the folder: what a change of queue costs a fence.
            "polling_interval": 0.05,
        },
    }

app.conf.update(
    **broker,
    # Results are rows.
    task_ignore_result=True,
    # A long copy on `bulk` never starves a fence on `prompt`.
    task_queues=[Queue(name, routing_key=name) for name in ("prompt", "bulk")],
    task_default_queue="prompt",
    task_time_limit=settings.DURABLE_STEP_SECONDS,
    # One message at a time, so that a waiting one can go to another worker.
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
    timezone="UTC",
    beat_schedule={
        # Rows that are due and whose message was lost.
        "moves": {"task": "migrations_app.due", "schedule": 1.0, "options": {"expires": 2.0}},
        # Scratch names of rehearsals that were killed.
        "scratch": {
            "task": "migrations_app.scratch",
            "schedule": 600.0,
            "options": {"queue": "bulk", "expires": 600.0},
        },
        # Instances whose lease and longest turn are over.
        "instances": {"task": "tenants.sweep", "schedule": 5.0, "options": {"expires": 5.0}},
        # Limits over the instances that share them.
        "limits": {"task": "capacity.allocate", "schedule": 5.0, "options": {"expires": 5.0}},
        # The same where an instance has just joined or a tenant moves.
        "newcomers": {
            "task": "capacity.allocate_soon",
            "schedule": 1.0,
            "options": {"expires": 2.0},
        },
        # Reported usage that is not in the ledger yet.
        "usage": {"task": "capacity.roll_up", "schedule": 5.0, "options": {"expires": 5.0}},
        # Budgets that were used up, or raised, without anybody noticing.
        "budgets": {"task": "capacity.budgets", "schedule": 60.0, "options": {"expires": 60.0}},
        # Which tenants runtimes build ahead.
        "prewarm": {
            "task": "capacity.prewarm",
            "schedule": 300.0,
            "options": {"queue": "bulk", "expires": 300.0},
        },
        # Lines and minutes of usage that are kept no longer.
        "old usage": {
            "task": "capacity.sweep",
            "schedule": 3600.0,
            "options": {"queue": "bulk", "expires": 3600.0},
        },
    },
    # The embedded default keeps beat's own file beside its database.
    beat_schedule_filename=str(settings.HOME / "beat"),
)
app.autodiscover_tasks()

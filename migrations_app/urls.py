"""Pages and fragments of moves."""

from __future__ import annotations

from django.urls import path

from migrations_app import views, views_channels, views_rehearsals

MOVE = "moves/mv-<int:pk>"

urlpatterns = [
    path("moves/", views.moves, name="moves"),
    path("moves/table/", views.moves_table, name="moves_table"),
    path("moves/live/", views.live_moves, name="live_moves"),
    path("moves/new/", views.new_move, name="new_move"),
    path(f"{MOVE}/", views.move, name="move"),
    path(f"{MOVE}/head/", views.head, name="head"),
    path(f"{MOVE}/facts/", views.facts, name="facts"),
    path(f"{MOVE}/phases/", views.phases, name="phases"),
    path(f"{MOVE}/progress/", views.progress, name="progress"),
    path(f"{MOVE}/fence/", views.fence, name="fence"),
    path(f"{MOVE}/instances/", views.instances, name="instances"),
    path(f"{MOVE}/split/", views.split, name="split"),
    path(f"{MOVE}/channels/", views.channels, name="channels"),
    path(
        f"{MOVE}/channels/<int:row>/<str:step>/",
        views_channels.check_channel,
        name="check_channel",
    ),
    path(f"{MOVE}/artifacts/", views.artifacts, name="artifacts"),
    path(f"{MOVE}/references.csv", views.references, name="references"),
    path(f"{MOVE}/checks/", views.checks, name="checks"),
    path(f"{MOVE}/mismatches/", views.mismatches, name="mismatches"),
    path(f"{MOVE}/mismatches/<int:mismatch_pk>/", views.mismatch, name="mismatch"),
    path(f"{MOVE}/mismatches/<int:mismatch_pk>/versions.json", views.versions, name="versions"),
    path(f"{MOVE}/late-writes.json", views.late_versions, name="late_versions"),
    path(f"{MOVE}/log/", views.log, name="log"),
    path(f"{MOVE}/samples/", views.samples, name="samples"),
    path(f"{MOVE}/changed.json", views.changed_figure, name="changed_figure"),
    path(f"{MOVE}/pause/", views.pause, name="pause"),
    path(f"{MOVE}/resume/", views.resume, name="resume"),
    path(f"{MOVE}/abort/", views.abort, name="abort"),
    path(f"{MOVE}/drain/", views.close_fence, name="close_fence"),
    path(f"{MOVE}/drain/cancel/", views.cancel_fence, name="cancel_fence"),
    path(f"{MOVE}/hold/", views.hold_fence, name="hold_fence"),
    path(f"{MOVE}/offboard/", views.confirm_offboard, name="confirm_offboard"),
    path(f"{MOVE}/leave/", views.leave_behind, name="leave_behind"),
    path(f"{MOVE}/pace/", views.set_pace, name="set_pace"),
    path(f"{MOVE}/flip/", views.flip, name="flip"),
    path(f"{MOVE}/rollback/", views.rollback, name="rollback"),
    path(f"{MOVE}/rollback/cancel/", views.cancel_rollback, name="cancel_rollback"),
    path(f"{MOVE}/recopy/", views.recopy, name="recopy"),
    path(f"{MOVE}/reconcile/", views.reconcile_users, name="reconcile_users"),
    path(f"{MOVE}/accept/", views.accept, name="accept"),
    path("channels/", views_channels.side_channels, name="side_channels"),
    path("channels/new/", views_channels.new_channel, name="new_channel"),
    path("channels/<int:channel>/", views_channels.edit_channel, name="edit_channel"),
    path("channels/<int:channel>/remove/", views_channels.remove_channel, name="remove_channel"),
    path("restored/", views.restored_page, name="restored"),
    path("restored/start/", views.start_machines, name="start_machines"),
    path("restored/<slug:slug>/settle/", views.settle, name="settle"),
    path("restored/<slug:slug>/leave/", views.leave_refused, name="leave_refused"),
    path("tenants/<slug:slug>/moves/", views.tenant_moves, name="tenant_moves"),
    path("tenants/<slug:slug>/rehearsals/", views_rehearsals.rehearsals, name="rehearsals"),
    path("tenants/<slug:slug>/rehearse/", views_rehearsals.rehearse, name="rehearse"),
]

"""Each kind of step of a side channel, carried out for real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.conf import LazySettings

from durable.errors import Refused
from durable.machine import Overtaken
from migrations_app import channels, queries
from migrations_app.copying import Timer
from migrations_app.domain.channels import BadStep, ChannelState, Step
from migrations_app.domain.phases import Phase
from migrations_app.models import MoveChannel, SideChannel, TenantMigration
from migrations_app.ports.channel import NotAllowed
from migrations_app.services import InvalidOption, NotNow, StalePage
from tenants.models import AuditEntry
from tenants.services import ReasonMissing
from tests.world import APP, World

pytestmark = pytest.mark.django_db

COPY, VERIFY = "tests.vectors:copy", "tests.vectors:verify"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: LazySettings) -> Path:
    """Let this module's callables and the programs of a folder be called."""
    monkeypatch.setenv("VECTORS_ROOT", str(tmp_path / "vectors"))
    settings.CHANNEL_MODULES = ["tests.vectors"]
    settings.CHANNEL_COMMANDS = tmp_path / "bin"
    settings.CHANNEL_VARIABLES = ["VECTORS_ROOT"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "vectors").mkdir()
    return tmp_path


def vector(root: Path, name: str, store: str = "store-eu1-a") -> Path:
    path = root / "vectors" / store / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(name)
    return path


def program(root: Path, name: str, text: str) -> str:
    path = root / "bin" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return name


def register(world: World, name: str = "vectors", **columns: Any) -> SideChannel:
    chosen = {"tenant": world.cast.acme, "by": "ada", "now": world.clock()}
    return channels.register(name=name, **{**chosen, **columns})


def command(world: World, text: str, **columns: Any) -> SideChannel:
    return register(world, copy_by="command", copy_step=text, **columns)


def function(world: World, name: str, **columns: Any) -> SideChannel:
    return register(world, copy_by="callable", copy_step=f"tests.vectors:{name}", **columns)


def live(world: World) -> TenantMigration:
    """A move that has copied its sessions and waits for a person."""
    if not TenantMigration.objects.exists():
        world.start(automatic=False)
    for _ in range(50):
        if (move := world.move).stage == "ready":
            return move
        world.step()
    raise AssertionError(world.move.stage)


def run(world: World, times: int = 1, *, seconds: float = 5.0) -> MoveChannel:
    """Carry out what is due, and return the one channel as it is then."""
    for _ in range(times):
        channels.run(world.move, timer=Timer(seconds), clock=world.clock)
    return row(world)


def row(world: World) -> MoveChannel:
    return MoveChannel.objects.select_related("channel").get(move=world.move)


def log(world: World) -> list[str]:
    events = world.move.events.filter(note__contains="vectors:").order_by("id")
    return [event.note for event in events]


# --- callables ------------------------------------------------------------------------------------


def test_a_callable_is_called_again_with_its_cursor_until_it_is_done(
    files: World, root: Path
) -> None:
    for n in range(5):
        vector(root, f"v-{n}")
    function(files, "copy", verify_by="callable", verify_step=VERIFY)
    live(files)
    first = run(files)
    assert (first.state, first.cursor, first.detail) == ("open", "v-1", "2 vectors")
    assert run(files).cursor == "v-3"
    copied = run(files)
    assert (copied.state, copied.cursor, copied.verified_at) == ("copied", "v-4", None)
    green = run(files)
    assert (green.state, green.detail) == ("green", "5 vectors")
    assert log(files) == ["vectors: copied, 1 vectors", "vectors: verified, 5 vectors"]
    assert not channels.run(files.move, timer=Timer(1), clock=files.clock)


def test_what_differs_is_copied_again_from_the_start(files: World, root: Path) -> None:
    for n in range(2):
        vector(root, f"v-{n}")
    function(files, "copy", verify_by="callable", verify_step=VERIFY)
    live(files)
    run(files)
    (root / "vectors" / "store-eu1-b" / "v-0").unlink()
    differs = run(files)
    assert (differs.state, differs.copied_at, differs.cursor) == ("failed", None, "")
    assert differs.detail == "It differs: 1 vectors are missing"
    assert run(files) == differs
    files.clock.pass_by(2)
    assert run(files, 2).state == "green"


def test_a_callable_that_raises_is_tried_again_after_pauses_that_grow(
    files: World, root: Path
) -> None:
    function(files, "fail")
    live(files)
    pauses = []
    for _ in range(7):
        failed = run(files)
        assert failed.next_at is not None
        pauses.append((failed.next_at - files.clock()).total_seconds())
        files.clock.now = failed.next_at
    assert pauses == [2, 5, 15, 30, 60, 60, 60]
    assert (failed.state, failed.failures) == ("failed", 7)
    assert failed.detail == "It ended with exit code 1."
    assert log(files) == ["vectors: copy failed: It ended with exit code 1."]


def test_what_is_no_answer_is_named(files: World, root: Path) -> None:
    function(files, "silent")
    live(files)
    assert run(files).detail.startswith('Its answer has no "state"')


def test_a_call_has_nothing_of_ours_but_what_it_was_given_by_name(
    files: World, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SECRET_KEY", "DATABASE_URL", "REDIS_URL"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    assert "STORE_EU1_A" in os.environ
    function(files, "environment")
    live(files)
    assert run(files).detail == "holds PATH, LC_ALL, VECTORS_ROOT"


# --- commands -------------------------------------------------------------------------------------


def test_a_command_is_told_what_to_do_in_its_environment(files: World, root: Path) -> None:
    name = program(
        root,
        "told",
        'echo "$@ $SWITCHYARD_STEP $SWITCHYARD_APP_NAME $SWITCHYARD_FROM_STORE'
        ' $SWITCHYARD_FROM_CELL $SWITCHYARD_TO_STORE $SWITCHYARD_TO_CELL $SWITCHYARD_PHASE" >&2\n'
        'echo "{\\"state\\": \\"done\\", \\"words\\": \\"$2, $SWITCHYARD_STEP of'
        ' $SWITCHYARD_APP_NAME to $SWITCHYARD_TO_STORE\\"}"',
    )
    command(files, f"{name} --index 'two words; $(id)'")
    live(files)
    assert run(files).detail == f"two words; $(id), copy of {APP} to store-eu1-b"


@pytest.mark.parametrize(
    ("script", "detail"),
    [
        pytest.param("exit 3", "It ended with exit code 3.", id="code"),
        pytest.param("exit 75", "It asks to be called later.", id="later"),
        pytest.param("kill -9 $$", "It ended with exit code 137.", id="signal"),
        pytest.param("echo hello", "Its last line of output is no JSON.", id="words"),
        pytest.param("true", "Its last line of output is no JSON.", id="silence"),
        pytest.param(
            "echo 'secret' >&2; echo 'switchyard: index is away' >&2; exit 1",
            "It ended with exit code 1: index is away",
            id="safe line",
        ),
        pytest.param(
            """echo '{"state": "again"}'""",
            'It answered "again" without a cursor, by which to go on.',
            id="no cursor",
        ),
        pytest.param(
            """echo '{"state": "differs"}'""",
            'A copy step answered "differs", which only a verify step may say.',
            id="copy differs",
        ),
    ],
)
def test_a_command_that_fails_says_how_and_nothing_else(
    files: World, root: Path, script: str, detail: str
) -> None:
    command(files, program(root, "fails", script))
    live(files)
    failed = run(files)
    assert (failed.state, failed.detail) == ("failed", detail)


def test_a_flood_of_output_costs_no_memory_and_its_last_line_counts(
    files: World, root: Path
) -> None:
    flood = "head -c 3000000 /dev/zero | tr '\\0' 'x'; echo; echo '{\"state\": \"done\"}'"
    command(files, program(root, "flood", flood))
    live(files)
    assert run(files).state == "copied"


def alive(pid: int) -> bool:
    try:
        # Z: dead, and not yet waited for by whoever adopted it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int) -> bool:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        if not alive(pid):
            return True
        time.sleep(0.02)
    return False


def test_a_call_out_of_time_is_ended_with_all_that_it_started(
    files: World, root: Path, settings: LazySettings
) -> None:
    settings.DURABLE_LEASE_SECONDS = 3.0
    pids = root / "pids"
    command(files, program(root, "slow", f"sleep 60 & echo $! $$ > {pids}\nwait"))
    live(files)
    began = time.monotonic()
    failed = run(files)
    assert time.monotonic() - began < 3
    assert failed.detail.startswith("No answer within 1 s, so it was ended.")
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def test_what_a_command_leaves_running_ends_with_it(files: World, root: Path) -> None:
    pids = root / "pids"
    text = f'sleep 60 >/dev/null 2>&1 &\necho $! > {pids}\necho \'{{"state": "done"}}\''
    command(files, program(root, "leaves", text))
    live(files)
    assert run(files).state == "copied"
    assert gone(int(pids.read_text()))


# Leaves its session, and the shell that started it ends before it does: an orphan.
ESCAPED = "setsid sh -c 'echo $$ >> {pids}; exec sleep 60' >/dev/null 2>&1 &\n"
ESCAPED += "while [ ! -s {pids} ]; do sleep 0.01; done\n"


@pytest.mark.parametrize("left", ["at its end", "out of time"])
def test_what_leaves_its_session_ends_with_the_call(
    files: World, root: Path, settings: LazySettings, left: str
) -> None:
    settings.DURABLE_LEASE_SECONDS = 3.0
    pids = root / "pids"
    ends = 'echo \'{"state": "done"}\'' if left == "at its end" else "sleep 60"
    command(files, program(root, "escapes", f"({ESCAPED.format(pids=pids)})\n{ends}"))
    live(files)
    assert run(files).state == ("copied" if left == "at its end" else "failed")
    assert gone(int(pids.read_text()))


@pytest.mark.parametrize("escapes", [False, True])
def test_a_call_ends_when_its_worker_is_killed(root: Path, escapes: bool) -> None:
    pids = root / "pids"
    text = f"({ESCAPED.format(pids=pids)})\nsleep 60" if escapes else f"echo $$ > {pids}\nsleep 60"
    program(root, "slow", text)
    worker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from pathlib import Path; from migrations_app.ports.channel import Allowed, call;"
            "from migrations_app.domain.channels import Step;"
            f"call('command', 'slow', Step.COPY, {{}}, may=Allowed([], Path('{root}/bin')),"
            " seconds=60)",
        ]
    )
    until = time.monotonic() + 20
    while not (pids.exists() and pids.read_text().strip()) and time.monotonic() < until:
        time.sleep(0.02)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert gone(int(pids.read_text()))


# --- what may be called ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by", "text", "words"),
    [
        pytest.param("callable", "os:system", "SWITCHYARD_CHANNEL_MODULES", id="module"),
        pytest.param("callable", "tests.vectorsx:copy", "may not be called", id="alike"),
        pytest.param("callable", "tests:world", "may not be called", id="above"),
        pytest.param("callable", "tests.vectors:_folder", "is no callable", id="private"),
        pytest.param("callable", "tests.vectors:os.system", "is no callable", id="through"),
        pytest.param("callable", "tests.vectors", "is no callable", id="no function"),
        pytest.param("command", "/bin/sh -c id", "is no command", id="absolute"),
        pytest.param("command", "../bin/sh", "is no command", id="upwards"),
        pytest.param("command", ".hidden", "is no command", id="hidden"),
        pytest.param("command", "nothing", "is no program in the folder", id="absent"),
        pytest.param("command", "p" * 300, "is no program in the folder", id="no file's name"),
        pytest.param("command", "plain", "is no program in the folder", id="not executable"),
        pytest.param("command", "link", "is no program in the folder", id="link"),
        pytest.param("command", "folder", "is no program in the folder", id="folder"),
        pytest.param("command", "'open", "a quote that is not closed", id="quote"),
        pytest.param("command", "", "one line", id="nothing"),
        pytest.param("command", "told\nid", "one line", id="lines"),
        pytest.param("person", "do it", "leave it empty", id="person"),
        pytest.param("magic", "do it", "Choose one of", id="magic"),
    ],
)
def test_what_nobody_allowed_is_refused(
    files: World, root: Path, by: str, text: str, words: str
) -> None:
    (root / "bin" / "plain").write_text("#!/bin/sh\n")
    (root / "bin" / "link").symlink_to("/bin/sh")
    (root / "bin" / "folder").mkdir()
    with pytest.raises(Refused) as caught:
        register(files, copy_by=by, copy_step=text)
    assert isinstance(caught.value, BadStep | NotAllowed)
    assert words in str(caught.value)
    assert not SideChannel.objects.exists()


def test_a_program_is_refused_where_the_operator_named_no_folder(
    files: World, root: Path, settings: LazySettings
) -> None:
    name = program(root, "told", "true")
    settings.CHANNEL_COMMANDS = None
    with pytest.raises(NotAllowed, match="SWITCHYARD_CHANNEL_COMMANDS"):
        command(files, name)


def test_what_is_no_longer_allowed_is_not_called(
    files: World, root: Path, settings: LazySettings
) -> None:
    function(files, "copy")
    live(files)
    settings.CHANNEL_MODULES = []
    assert run(files).detail.startswith("Callables of tests.vectors may not be called here.")


def test_what_a_module_has_imported_is_not_called(files: World, root: Path) -> None:
    function(files, "system")
    live(files)
    assert run(files).detail == (
        "It ended with exit code 126: system is not defined in tests.vectors"
    )


# --- people ---------------------------------------------------------------------------------------


def test_a_person_checks_off_and_takes_back(files: World) -> None:
    register(files)
    live(files)
    assert not channels.run(files.move, timer=Timer(1), clock=files.clock)
    said: dict[str, Any] = {"by": "ada", "now": files.clock()}
    with pytest.raises(NotNow, match="has not been copied"):
        channels.check_off(row(files), step="verify", note="looked", **said)
    channels.check_off(row(files), step="copy", note="index moved with its own tool", **said)
    copied = row(files)
    assert (copied.state, copied.by) == ("copied", "ada")
    assert copied.detail == "index moved with its own tool"
    with pytest.raises(NotNow, match="done already"):
        channels.check_off(copied, step="copy", note="again", **said)
    channels.check_off(copied, step="verify", note="12 hits on both", **said)
    assert row(files).state == ChannelState.GREEN
    channels.uncheck(row(files), step="copy", note="of the wrong day", **said)
    assert (row(files).state, row(files).verified_at) == ("open", None)
    with pytest.raises(NotNow, match="is not done"):
        channels.uncheck(row(files), step="verify", note="of the wrong day", **said)
    assert log(files) == [
        "vectors: copy checked off: index moved with its own tool",
        "vectors: verify checked off: 12 hits on both",
        "vectors: copy taken back: of the wrong day",
    ]
    verbs = AuditEntry.objects.filter(verb__startswith="channel.").order_by("id")
    assert [entry.verb for entry in verbs] == [
        "channel.register",
        "channel.check_off",
        "channel.check_off",
        "channel.uncheck",
    ]


def test_a_check_off_needs_a_note_a_known_step_and_the_phase_that_was_seen(files: World) -> None:
    register(files)
    live(files)
    run(files)
    said: dict[str, Any] = {"by": "ada", "now": files.clock()}
    with pytest.raises(ReasonMissing):
        channels.check_off(row(files), step="copy", note=" ", **said)
    with pytest.raises(InvalidOption):
        channels.check_off(row(files), step="dance", note="x", **said)
    with pytest.raises(InvalidOption):
        channels.check_off(row(files), step="copy", note="\0", **said)
    with pytest.raises(StalePage):
        channels.check_off(row(files), step="copy", note="x", seen="verify", **said)
    TenantMigration.objects.update(phase=Phase.OFFBOARD)
    with pytest.raises(NotNow, match="OFFBOARD"):
        channels.check_off(row(files), step="copy", note="x", **said)
    assert row(files).state == ChannelState.OPEN


def test_a_person_may_do_what_a_program_should_have(files: World, root: Path) -> None:
    function(files, "fail")
    live(files)
    failed = run(files)
    channels.check_off(failed, step="copy", note="by hand", by="ada", now=files.clock())
    assert (row(files).state, row(files).failures) == ("copied", 0)


def test_a_word_of_a_person_wakes_the_move(files: World) -> None:
    register(files)
    live(files)
    run(files)
    before = files.move
    TenantMigration.objects.update(due_at=files.clock().replace(year=2030))
    channels.check_off(row(files), step="copy", note="done", by="ada", now=files.clock())
    assert files.move.due_at == files.clock()
    assert files.move.version == before.version + 1


def test_a_persons_word_stands_against_a_call_that_ends_behind_it(
    files: World, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function(files, "fail")
    live(files)
    real = channels.port.call

    def call(*args: Any, **kwargs: Any) -> Any:
        channels.check_off(row(files), step="copy", note="by hand", by="ada", now=files.clock())
        return real(*args, **kwargs)

    monkeypatch.setattr(channels.port, "call", call)
    run(files)
    assert (row(files).state, row(files).detail) == ("copied", "by hand")


# --- the list -------------------------------------------------------------------------------------


def test_a_move_lists_its_tenants_channels_and_its_agents(files: World, root: Path) -> None:
    mine = register(files)
    agents = register(files, "logs", tenant=None, agent=files.cast.acme.agent)
    register(files, "others", tenant=files.cast.bolt)
    register(files, "foreign", tenant=None, agent=files.cast.core.agent)
    live(files)
    assert channels.list_channels(files.move) == 2
    assert channels.list_channels(files.move) == 2
    assert [r.channel for r in queries.listed_channels(files.move)] == [agents, mine]


def test_one_registered_during_the_backfill_joins_and_a_removed_one_leaves(
    files: World, root: Path
) -> None:
    live(files)
    assert queries.channels_before_fence(files.move) == ""
    late = register(files)
    channels.run(files.move, timer=Timer(1), clock=files.clock)
    assert queries.channels_before_fence(files.move) == (
        "side channel vectors to be copied by a person"
    )
    channels.remove(late, by="ada", reason="gone", now=files.clock())
    assert queries.channels_before_fence(files.move) == ""
    with pytest.raises(NotNow, match="was removed"):
        channels.remove(late, by="ada", reason="gone", now=files.clock())
    register(files)


def test_what_is_owed_is_named_with_its_reason(files: World, root: Path) -> None:
    function(files, "fail")
    optional = register(files, "logs", required=False)
    live(files)
    run_all(files)
    words = "side channel vectors to be copied (It ended with exit code 1)"
    assert queries.channels_before_fence(files.move) == words
    assert queries.channels_before_flip(files.move) == words
    assert optional in [r.channel for r in queries.open_channels(files.move)]


def run_all(world: World) -> None:
    channels.run(world.move, timer=Timer(5), clock=world.clock)


# --- registering ----------------------------------------------------------------------------------


def test_a_channel_is_edited_and_its_audit_has_both(files: World, root: Path) -> None:
    made = register(files, about="the index")
    said: dict[str, Any] = {"by": "ada", "reason": "a program does it now", "now": files.clock()}
    channels.edit(made, copy_by="callable", copy_step=COPY, required=False, **said)
    entry = AuditEntry.objects.get(verb="channel.edit")
    assert entry.before is not None
    assert entry.after is not None
    assert (entry.before["copy_by"], entry.after["copy_by"]) == ("person", "callable")
    assert (entry.before["required"], entry.after["required"]) == (True, False)
    with pytest.raises(NotAllowed):
        channels.edit(made, copy_step="os:system", **said)
    assert SideChannel.objects.get().copy_step == COPY


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        pytest.param({"tenant": None}, "to an agent or to a tenant", id="nobody"),
        pytest.param({"name": ""}, "name must be one line", id="unnamed"),
        pytest.param({"name": "taken"}, "has a side channel taken already", id="taken"),
        pytest.param({"about": "x\0"}, "none of them NUL", id="nul"),
    ],
)
def test_what_makes_no_sense_is_refused(files: World, columns: dict[str, Any], words: str) -> None:
    register(files, "taken")
    with pytest.raises(Refused) as caught:
        register(files, **columns)
    assert words in str(caught.value)
    assert SideChannel.objects.count() == 1


# --- workers that die, or come too late -----------------------------------------------------------


def test_a_worker_that_dies_in_a_call_loses_nothing(
    files: World, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(4):
        vector(root, f"v-{n}")
    function(files, "copy", verify_by="callable", verify_step=VERIFY)
    live(files)
    run(files)
    before = row(files)
    real = channels.port.call

    def dies(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(channels.port, "call", dies)
    with pytest.raises(KeyboardInterrupt):
        run(files)
    after = row(files)
    assert (after.cursor, after.state) == (before.cursor, before.state) == ("v-1", "open")
    monkeypatch.setattr(channels.port, "call", real)
    assert run(files, 2).state == "green"


def test_an_overtaken_worker_records_nothing(files: World, root: Path) -> None:
    vector(root, "v-0")
    function(files, "copy")
    live(files)
    run_list(files)
    stale = files.move
    TenantMigration.objects.update(claim=stale.claim + 1)
    with pytest.raises(Overtaken):
        channels.run(stale, timer=Timer(5), clock=files.clock)
    assert row(files).state == ChannelState.OPEN


def run_list(world: World) -> None:
    channels.list_channels(world.move)


# --- which step is due when ----------------------------------------------------------------------


@pytest.fixture
def fenced(files: World, root: Path) -> Callable[..., MoveChannel]:
    """A channel that is green since before the fence, its move in a phase behind it."""

    def make(phase: Phase, cursor: str = "v-1", **columns: Any) -> MoveChannel:
        chosen = {"copy_by": "callable", "copy_step": COPY, "verify_by": "callable"}
        at = files.clock()
        far = {"copied_at": at, "verified_at": at, "cursor": cursor}
        far |= {name: columns.pop(name) for name in far if name in columns}
        register(files, **{**chosen, "verify_step": VERIFY, **columns})
        live(files)
        channels.list_channels(files.move)
        MoveChannel.objects.update(**far, state=ChannelState.GREEN)
        files.clock.pass_by(10)
        TenantMigration.objects.update(
            phase=phase, fence_closed_at=files.clock(), fence_version=7, deadline_at=None
        )
        return row(files)

    return make


def test_a_copy_that_left_a_cursor_is_run_once_more_inside_the_fence(
    files: World, root: Path, fenced: Callable[..., MoveChannel]
) -> None:
    for n in range(3):
        vector(root, f"v-{n}")
        if n < 2:
            vector(root, f"v-{n}", "store-eu1-b")
    fenced(Phase.DELTA)
    assert queries.channels_before_flip(files.move) == "side channel vectors to be copied"
    files.clock.pass_by(1)
    assert run(files).detail == "1 vectors"
    assert queries.channels_before_flip(files.move) == "side channel vectors to be verified"
    assert run(files).state == "green"
    assert queries.channels_before_flip(files.move) == ""
    assert (root / "vectors" / "store-eu1-b" / "v-2").exists()


@pytest.mark.parametrize(
    ("phase", "cursor", "columns", "step"),
    [
        pytest.param(Phase.DELTA, "", {}, None, id="no cursor"),
        pytest.param(
            Phase.DELTA, "c", {"copy_by": "person", "copy_step": ""}, None, id="a person's"
        ),
        pytest.param(Phase.SOAK, "c", {}, None, id="soak"),
        pytest.param(Phase.SOAK, "", {"copied_at": None}, None, id="soak, not copied"),
        pytest.param(Phase.SOAK, "", {"verified_at": None}, None, id="soak, not verified"),
        pytest.param(Phase.TARGET, "", {}, None, id="target"),
        pytest.param(Phase.REVERSE_DELTA, "", {}, Step.COPY, id="back"),
        pytest.param(
            Phase.REVERSE_DELTA, "", {"copy_by": "person", "copy_step": ""}, None, id="back, person"
        ),
        pytest.param(Phase.OFFBOARD, "c", {}, None, id="over"),
    ],
)
def test_inside_a_fence_only_what_a_program_has_to_catch_up_is_due(
    files: World,
    fenced: Callable[..., MoveChannel],
    phase: Phase,
    cursor: str,
    columns: dict[str, Any],
    step: Step | None,
) -> None:
    fenced(phase, cursor, **columns)
    assert queries.channel_step(files.move, row(files)) is step


def test_on_the_way_back_a_program_is_told_the_other_direction(
    files: World, root: Path, fenced: Callable[..., MoveChannel]
) -> None:
    for n in range(3):
        vector(root, f"v-{n}", "store-eu1-b")
    # What the way forward left is no cursor of the way back.
    fenced(Phase.REVERSE_DELTA, cursor="v-9")
    files.clock.pass_by(1)
    assert run(files).cursor == "\n7\nv-1"
    back = run(files)
    assert (back.cursor, back.detail) == ("", "1 vectors")
    assert run(files).state == "green"
    assert len(list((root / "vectors" / "store-eu1-a").iterdir())) == 3
    # An unfinished cursor of another fence, and of the way back, is worth nothing.
    MoveChannel.objects.update(cursor="\n6\nv-1")
    assert channels._cursor(files.move, row(files).cursor) == ""
    TenantMigration.objects.update(phase=Phase.SOAK)
    assert channels._cursor(files.move, row(files).cursor) == ""
    assert channels._cursor(files.move, "v-1") == "v-1"


def test_a_call_inside_the_fence_ends_with_its_deadline(
    files: World, root: Path, fenced: Callable[..., MoveChannel]
) -> None:
    fenced(Phase.DELTA, copy_step="tests.vectors:hang")
    TenantMigration.objects.update(deadline_at=files.clock())
    began = time.monotonic()
    failed = run(files)
    assert time.monotonic() - began < 3
    assert failed.detail.startswith("No answer within 1 s")
    assert failed.state == ChannelState.FAILED
    assert gone(int((root / "vectors" / "pid").read_text()))

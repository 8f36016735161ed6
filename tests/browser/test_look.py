"""How pages look on every width and theme: no overflow, contrast, names, a quiet console."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from capacity.models import SharedResource
from migrations_app.domain.phases import Phase
from migrations_app.models import ArtifactReference, RestoreFinding, TenantMigration
from tenants import services
from tenants.domain.roles import Role
from tenants.models import AuditEntry, RuntimeInstance
from tests import make, scene
from tests.browser.conftest import Windows

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True, serialized_rollback=True),
]

# Text nodes whose contrast with what is behind them is below 4.5 (3 where large), such as
# ["span.status Blocked", 3.9]. Disabled controls are exempt, as in WCAG.
CONTRAST = """() => {
  const parse = (c) => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const f = (v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
  };
  const behind = (el) => {
    for (let e = el; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const el = walk.currentNode.parentElement;
    const words = walk.currentNode.textContent.trim();
    if (!words || el.closest("script, svg, .plot, .sr, [hidden], :disabled")) continue;
    const box = el.getBoundingClientRect();
    if (!box.width || !box.height || getComputedStyle(el).visibility === "hidden") continue;
    const style = getComputedStyle(el);
    const [a, b] = [light(parse(style.color)), light(behind(el))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const large = parseFloat(style.fontSize) >= 18.66 && +style.fontWeight >= 600;
    if (ratio < (large ? 3 : 4.5)) found.push([`${el.tagName}.${el.className} ${words}`, ratio]);
  }
  return found;
}"""
# Controls that a screen reader could not name.
NAMELESS = """() => [
  ...document.querySelectorAll("a, button, input:not([type=hidden]), select, [role=img]")]
  .filter((el) => !(el.textContent.trim() || el.getAttribute("aria-label")
    || (el.labels && el.labels.length) || el.getAttribute("aria-labelledby")))
  .map((el) => el.outerHTML.slice(0, 120))"""
# What stands where nobody sees it without scrolling sideways, or on top of its neighbour.
CUT = """() => [...document.querySelectorAll(".table-wrap, .names li")]
  .filter((el) => el.scrollWidth > el.clientWidth).map((el) => el.textContent.slice(0, 60))"""
WIDER = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture
def pages(here: make.Cast, at: datetime) -> list[str]:
    """Every page, with moves in every kind of state and texts that are long."""
    blocked = scene.move(here, Phase.VERIFY, now=at)
    rows = scene.mismatches(blocked, now=at)
    rows[1].session_id = "session-" + "x" * 110
    rows[1].first_difference = "event 41: content.parts[0].text is " + "y" * 200
    rows[1].save()
    states: list[tuple[Phase, dict[str, Any]]] = [
        (Phase.PREPARE, {"checks": [{"name": "Quota", "ok": False, "detail": "z" * 160}]}),
        (Phase.BACKFILL, {"pause_requested_at": at, "pause_requested_by": "olga"}),
        (Phase.DRAIN, {}),
        (Phase.SOAK, {}),
        (Phase.ABORTED, {}),
        (Phase.REVERSE_VERIFY, {}),
        (Phase.ROLLED_BACK, {}),
    ]
    moves = [blocked]
    for index, (phase, columns) in enumerate(states):
        slug = f"tenant-with-a-long-name-{index}"
        tenant = make.tenant(slug, cell=here.cell, store=here.store, now=at)
        moves.append(scene.move(here, phase, now=at, tenant=tenant, **columns))
    for index, phase in enumerate((Phase.SPLIT, Phase.VERIFY, Phase.REVERSE_DELTA)):
        slug = f"split-{index}"
        tenant = make.tenant(slug, cell=here.cell, store=here.store, now=at)
        moves.append(scene.split_move(here, phase, now=at, tenant=tenant))
    split = moves[-3]
    listed = scene.channels(split)
    listed[0].state, listed[0].failures, listed[0].detail = "failed", 3, "z" * 200
    listed[0].save()
    scene.artifacts(split, 45)
    ArtifactReference.objects.filter(move=split).update(place="event 3 " + "x" * 200)
    late = scene.move(here, Phase.SOAK, now=at, tenant=here.core)
    scene.late_writes(late, now=at)
    more = scene.many_mismatches(blocked, 30, now=at)
    more[0].transient, more[1].accepted_at, more[1].accepted_reason = True, at, "z" * 200
    for row in more[:2]:
        row.save()
    scene.used(here, now=at)
    dead = RuntimeInstance.objects.filter(cell=here.cell).first()
    resource = SharedResource.objects.filter(control="").first()
    assert dead is not None
    assert resource is not None
    why = "Instance eu1-a-1 has applied policy ab12.57: run `manage.py restored`."
    services.halt(by="instance eu1-a-1", why=why, now=at)
    for tenant, homes in ((here.bolt, ["store-eu1-b"]), (here.acme, [])):
        told = "store-eu1-a: closed (mv-7); store-eu1-b: open (mv-7)"
        differs = "store-eu1-a is closed by mv-7, which is unknown here " + "z" * 90
        RestoreFinding.objects.create(
            tenant=tenant, found_at=at, says="cell-eu1-a", told=told, differs=differs, homes=homes
        )
    return [
        "/",
        "/restored/",
        "/instances/",
        f"/instances/{dead.pk}/",
        f"/instances/{dead.pk}/dead/",
        "/isolation/",
        "/isolation/resources/new/",
        f"/isolation/resources/{resource.pk}/",
        "/usage/",
        "/usage/reconciliation/",
        "/tenants/acme/usage/",
        "/tenants/acme/limits/",
        "/moves/",
        "/moves/?state=all",
        "/tenants/",
        "/tenants/acme/",
        "/moves/new/",
        "/moves/new/?tenant=bolt",
        *(f"/moves/mv-{move.pk}/" for move in moves),
        f"/moves/mv-{blocked.pk}/abort/",
        f"/moves/mv-{blocked.pk}/?state=all",
        f"/moves/mv-{split.pk}/abort/",
        f"/moves/mv-{split.pk}/drain/",
        f"/moves/mv-{split.pk}/channels/{listed[1].pk}/copy/",
        f"/moves/mv-{split.pk}/?references_page=2&numbers_page=2&users_page=1",
        "/channels/",
        "/channels/?tenant=split-0",
        "/channels/new/?tenant=split-0",
        f"/channels/{listed[0].channel_id}/",
        "/stores/",
        "/stores/store-eu1-b/",
        "/tenants/split-0/",
        "/tenants/bolt/rehearse/",
        f"/moves/mv-{late.pk}/",
        f"/moves/mv-{late.pk}/rollback/",
        f"/moves/mv-{late.pk}/pace/",
        f"/moves/mv-{blocked.pk}/mismatches/{rows[1].pk}/",
        "/nothing/",
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1024])
def test_no_page_is_wider_than_its_window(
    width: int, scheme: str, pages: list[str], windows: Windows
) -> None:
    window = windows(Role.ADMIN, width=width, scheme=scheme, calm=False)
    wide = {path: window.open(path).evaluate(WIDER) for path in pages}
    assert {path: by for path, by in wide.items() if by > 0} == {}


def test_long_names_of_tenants_to_build_ahead_stand_beside_each_other(
    here: make.Cast, at: datetime, windows: Windows
) -> None:
    here.cell.document = {"prewarm": [f"tenant-with-a-long-name-{n}" for n in range(20)]}
    here.cell.save()
    row = RuntimeInstance.objects.filter(cell=here.cell)[0]
    page = windows(Role.VIEWER, width=1024).open(f"/instances/{row.pk}/")
    assert page.locator(".names li").count() == 20
    assert page.evaluate(CUT) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_what_is_behind_it(
    scheme: str, pages: list[str], windows: Windows
) -> None:
    window = windows(Role.ADMIN, scheme=scheme, calm=False)
    faint = {path: window.open(path).evaluate(CONTRAST) for path in pages}
    assert {path: found for path, found in faint.items() if found} == {}


def test_every_control_has_a_name_and_every_page_one_heading(
    pages: list[str], windows: Windows
) -> None:
    window = windows(Role.ADMIN, calm=False)
    for path in pages:
        page = window.open(path)
        assert page.evaluate(NAMELESS) == [], path
        assert page.locator("h1").count() == 1, path
        assert page.locator("main").count() == 1, path


def test_the_first_tab_skips_to_the_content(here: make.Cast, windows: Windows) -> None:
    page = windows().open("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    assert page.url.endswith("/#main")


def test_the_console_stays_quiet(pages: list[str], windows: Windows) -> None:
    window = windows(Role.ADMIN)
    for path in pages:
        if path != "/nothing/":
            window.open(path).wait_for_timeout(300)
    assert window.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_chart_is_drawn_under_the_strict_policy(
    scheme: str, here: make.Cast, at: datetime, windows: Windows
) -> None:
    move = scene.move(here, Phase.VERIFY, now=at)
    page = windows(scheme=scheme).open(f"/moves/mv-{move.pk}/")
    plot = page.locator(".plot")
    expect(plot.locator("svg.main-svg").first).to_be_visible()
    expect(plot.locator(".scatterlayer .js-line")).to_have_count(2)
    assert plot.get_attribute("aria-busy") is None
    assert plot.get_attribute("data-error") is None
    # The box has its final height before the chart is in it.
    assert plot.bounding_box()["height"] == 160  # type: ignore[index]


def test_a_chart_whose_numbers_do_not_come_points_to_the_table(
    here: make.Cast, at: datetime, windows: Windows
) -> None:
    move = scene.move(here, Phase.VERIFY, now=at)
    window = windows(calm=False)
    window.page.route("**/changed.json", lambda route: route.abort())
    page = window.open(f"/moves/mv-{move.pk}/")
    expect(page.locator(".plot[data-error]")).to_be_visible()
    page.click("#samples-details summary")
    expect(page.locator("#move-samples tbody tr").first).to_be_visible()


def test_the_acts_of_a_fenced_move_stay_at_hand_on_a_small_screen(
    here: make.Cast, at: datetime, windows: Windows
) -> None:
    move = scene.move(here, Phase.DRAIN, now=at)
    page = windows(width=390).open(f"/moves/mv-{move.pk}/")
    page.mouse.wheel(0, 2_000)
    abort = page.locator(f"#act-{move}-abort")
    box = abort.bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= 900
    abort.click()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert _fits(page)


def _fits(page: Page) -> bool:
    box = page.locator("#dialog").bounding_box()
    return box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390


def test_an_abort_works_without_javascript(here: make.Cast, at: datetime, windows: Windows) -> None:
    move = scene.move(here, Phase.VERIFY, now=at)
    page = windows(javascript=False).open(f"/moves/mv-{move.pk}/")
    page.click(f"#act-{move}-abort")
    expect(page.locator("#dialog-h")).to_contain_text(f"Abort {move}")
    page.fill("#dialog-reason", "no script here")
    page.click("#dialog-act")
    expect(page.locator("#move-head")).to_contain_text("Aborting")
    assert AuditEntry.objects.get(verb="move.abort").reason == "no script here"
    move.refresh_from_db()
    assert move.abort_reason == "no script here"


def test_a_person_signs_in_and_out(here: make.Cast, windows: Windows) -> None:
    scene.person("olga", Role.OPERATOR)
    page = windows(None, calm=False).open("/tenants/")
    page.fill("#username", "olga")
    page.fill("#password", scene.PASSWORD)
    page.keyboard.press("Enter")
    page.wait_for_url("**/tenants/")
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/sign-in/")
    assert not TenantMigration.objects.exists()


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_a_tenant_s_own_page_can_be_read_and_its_charts_are_drawn(
    width: int, scheme: str, here: make.Cast, at: datetime, windows: Windows
) -> None:
    scene.used(here, now=at)
    window = windows(None, width=width, scheme=scheme)
    services.add_member(scene.person("mia", None), tenant=here.acme, by="adam", now=at)
    page = window.open("/sign-in/")
    page.fill("#username", "mia")
    page.fill("#password", scene.PASSWORD)
    page.keyboard.press("Enter")
    page.wait_for_url("**/my/usage/")
    for plot in page.locator(".plot").all():
        expect(plot.locator("svg.main-svg").first).to_be_visible()
    assert page.evaluate(WIDER) <= 0
    assert page.evaluate(CUT) == []
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(NAMELESS) == []

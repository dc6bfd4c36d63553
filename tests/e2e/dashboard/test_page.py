"""The dashboard in a browser, with servers that say what a test makes up."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest
from starlette.responses import Response

from nemo_gym.config_types import BaseServerConfig, ServerInstance
from nemo_gym.dashboard import board
from nemo_gym.dashboard.board import Board
from nemo_gym.dashboard.pages import dashboard_routes
from nemo_gym.global_config import find_open_port, load_global_config
from nemo_gym.rollouts.progress_record import ProgressRecord, RunProgress
from nemo_gym.server.head import HeadServer, application
from tests.e2e.dashboard.conftest import Visit
from tests.figures_server import FiguresServer, instance
from tests.support import serving

if TYPE_CHECKING:
    from playwright.async_api import Route

Visiting = Callable[..., AbstractAsyncContextManager[Visit]]
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@asynccontextmanager
async def head_on(port: int, instances: Sequence[ServerInstance]) -> AsyncIterator[str]:
    """Serve the dashboard of a deployment of these servers."""
    url = f"http://127.0.0.1:{port}"
    shown = Board(instances, url, Path("/work"))
    task = asyncio.create_task(shown.run())
    head = HeadServer(BaseServerConfig(host="127.0.0.1", port=port), load_global_config([]))
    try:
        async with serving(application(head, dashboard_routes(shown.look)), port=port, lifespan="off"):
            yield url
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "LOOKED_AT_S", 0.1)


@pytest.fixture
async def counter() -> FiguresServer:
    server = FiguresServer("counter", workers=3)
    for slot in range(3):
        server.change(slot, sessions_open=10 + slot, requests_handled=100, memory_bytes=2**26, started_at=time.time())
    return server


@pytest.fixture
async def agent() -> FiguresServer:
    server = FiguresServer("agent", workers=1)
    server.figures = replace(server.figures, kind="responses_api_agents")
    return server


@pytest.fixture
async def instances(counter: FiguresServer, agent: FiguresServer) -> AsyncIterator[list[ServerInstance]]:
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(server.app)) for server in (counter, agent)]
        yield [instance("counter", urls[0], 3), instance("agent", urls[1], 1)]


@pytest.fixture
async def head(instances: list[ServerInstance]) -> AsyncIterator[str]:
    async with head_on(find_open_port(), instances) as url:
        yield url


@pytest.fixture
def record() -> Iterator[ProgressRecord]:
    record = ProgressRecord()
    yield record
    record.close()


def progress(record: ProgressRecord, head: str, **values: object) -> RunProgress:
    now = time.time()
    run = RunProgress(
        record.run_id,
        pid=os.getpid(),
        head_url=head,
        agent="agent",
        output="/work/rollouts.jsonl",
        started_at=now - 20,
        updated_at=now,
        total=200,
        done=50,
        failed=4,
        running=16,
        lost_sessions=3,
        reward_sum=40.0,
        reward_count=50,
        reward_bounds=[0.0, 0.5, 1.0],
        reward_histogram=[0, 10, 0, 40],
        rate_per_s=2.5,
        history=[[now - 20, 0, 0, 0.0], [now - 10, 20, 1, 15.0], [now, 50, 4, 40.0]],
    )
    return replace(run, **values)


def cell(server: str, slot: int, column: int) -> str:
    return f"[aria-label='Workers of {server}'] tbody tr:nth-child({slot + 1}) > :nth-child({column})"


async def test_servers_and_their_workers_are_seen_and_followed(
    visiting: Visiting, head: str, counter: FiguresServer
) -> None:
    async with visiting(head) as visit:
        await visit.sees("All 2 servers answer; nothing is wrong")
        assert await visit.text(cell("counter", 2, 3)) == "12"
        assert "33" in await visit.text("#tiles")
        assert await visit.page.locator("table.workers th[scope=col]").count() > 10
        counter.change(2, sessions_open=77)
        await visit.shows(cell("counter", 2, 3), "77")
        await visit.shows("#charts figure:first-child .legend li:first-child b", "98")


async def test_a_run_is_seen_and_followed(visiting: Visiting, head: str, record: ProgressRecord) -> None:
    record.write(progress(record, head))
    async with visiting(head) as visit:
        await visit.sees("50\u2009/\u2009200")
        figures = (await visit.text(".run .figures")).split("\n")
        shown = dict(zip(figures[::2], figures[1::2], strict=True))
        assert (shown["failed"], shown["lost sessions"], shown["mean reward"]) == ("4", "3", "0.800")
        bar = visit.page.get_by_role("progressbar")
        assert await bar.get_attribute("aria-valuetext") == "54 of 200"
        await visit.page.locator(".run .chart:last-child summary").click()
        rows = visit.page.locator(".run .chart:last-child tbody tr")
        assert await rows.evaluate_all("rows => rows.map(row => [...row.cells].map(cell => cell.textContent))") == [
            ["0 to below 0.5", "10"],
            ["0.5 to below 1", "0"],
            ["1 or more", "40"],
        ]
        record.write(progress(record, head, done=196, running=0, finished="completed"))
        await visit.sees("completed", ".run")
        await visit.sees("196\u2009/\u2009200")


async def test_problems_are_told_in_words_and_announced_once(
    visiting: Visiting, head: str, counter: FiguresServer, agent: FiguresServer
) -> None:
    # A note is no problem.
    agent.figures = replace(agent.figures, lost_with_removed=2)
    async with visiting(head) as visit:
        await visit.sees("2 sessions lost")
        await visit.sees("nothing is wrong")
        assert await visit.page.title() == "NeMo Gym"
        counter.change(
            1, worker_id="new", pid=9, restarts=1, last_exit="killed by SIGKILL", sessions_open=0, sessions_lost=11,
            started_at=counter.figures.at + 29,
        )  # fmt: skip
        await visit.sees("1 problem", "#verdict")
        assert await visit.page.title() == "(1) NeMo Gym"
        await visit.sees("worker 1 was replaced (killed by SIGKILL); 11 sessions lost with it", "#events")
        await visit.shows("#announcements", re.compile(r"Problem\. counter: worker 1"))
        told = await visit.text("#announcements")
        counter.change(1, sessions_open=5)
        await visit.shows(cell("counter", 1, 3), "5")
        assert await visit.text("#announcements") == told


async def test_names_and_reasons_are_shown_as_text_whatever_they_contain(
    visiting: Visiting, record: ProgressRecord
) -> None:
    server = FiguresServer(HOSTILE, workers=1)
    async with serving(server.app) as url, head_on(find_open_port(), [instance(HOSTILE, url, 1)]) as head:
        record.write(progress(record, head, agent=HOSTILE, output=HOSTILE))
        async with visiting(head) as visit:
            await visit.sees(HOSTILE, ".server")
            await visit.sees(HOSTILE, ".run")
            server.change(0, restarts=1, last_exit=f"`{HOSTILE}", worker_id="new", pid=9)
            await visit.sees(HOSTILE, "#events")
            assert await visit.page.title() in ("NeMo Gym", "(1) NeMo Gym")
            assert await visit.page.locator("main img, main script").count() == 0


async def test_a_head_server_that_goes_and_comes_back_is_told_and_followed(
    visiting: Visiting, instances: list[ServerInstance], counter: FiguresServer
) -> None:
    port = find_open_port()
    async with AsyncExitStack() as stack:
        async with head_on(port, instances) as head:
            visit = await stack.enter_async_context(visiting(head, may_fail=True))
            await visit.sees("nothing is wrong")
        await visit.sees("The head server does not answer since")
        assert await visit.text("#live") == "not connected"
        assert await visit.text(cell("counter", 0, 3)) == "10"
        counter.change(0, sessions_open=55)
        async with head_on(port, instances):
            await visit.sees("Another deployment answers at this address")
            await visit.shows(cell("counter", 0, 3), "55")
            assert (await visit.text("#live")).startswith("live")
            assert await visit.page.locator("body.stale").count() == 0


async def test_what_the_page_cannot_show_is_told_until_it_can(
    visiting: Visiting, head: str, record: ProgressRecord
) -> None:
    async with visiting(head, may_fail=True) as visit:
        await visit.sees("nothing is wrong")
        record.write(progress(record, head, reward_bounds=[None, 1.0]))
        await visit.sees("This page can't show what the head server says", "#banner")
        assert await visit.text("#live") == "can't be shown"
        record.write(progress(record, head))
        await visit.sees("50\u2009/\u2009200")
        await visit.page.locator("#banner").wait_for(state="hidden")
        assert (await visit.text("#live")).startswith("live")


async def test_workers_of_a_server_that_does_not_answer_or_hides_them_do_not_count_as_well(
    visiting: Visiting, head: str, counter: FiguresServer, agent: FiguresServer
) -> None:
    async with visiting(head) as visit:
        await visit.shows("#tiles .tile:last-child .value", "4/4")
        agent.reply = lambda: Response(status_code=404)
        await visit.shows("#tiles .tile:last-child .value", "3/3")
        agent.health = 500
        await visit.shows("#tiles .tile:last-child .value", "3/4")
        counter.health, counter.reply = 500, lambda: Response(status_code=404)
        await visit.shows("#tiles .tile:last-child .value", "\u2013")
        assert await visit.page.locator("table.workers:visible").count() == 0


async def test_a_narrow_window_never_scrolls_sideways(visiting: Visiting, head: str, record: ProgressRecord) -> None:
    record.write(progress(record, head, output="/work/" + "long_name_" * 20 + ".jsonl"))
    async with visiting(head, width=360) as visit:
        await visit.sees("50\u2009/\u2009200")
        await visit.sees("nothing is wrong")
        for summary in await visit.page.locator(".chart summary").all():
            await summary.click()
        for width in (360, 320):
            await visit.page.set_viewport_size({"width": width, "height": 800})
            assert await visit.page.evaluate("document.documentElement.scrollWidth") <= width
        # The table itself does, and the keyboard reaches it.
        region = visit.page.get_by_role("region", name="Workers of counter")
        assert await region.evaluate("element => element.scrollWidth > element.clientWidth && element.tabIndex === 0")


async def until_known(head: str, sessions: int) -> None:
    """Wait until the head server knows how many sessions the first worker has."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(60):
        while True:
            async with session.get(f"{head}/dashboard/data") as reply:
                servers = (await reply.json())["servers"]
            if servers[0]["workers"][0]["sessions_open"] == sessions:
                return
            await asyncio.sleep(0.05)


FOCUSED = """() => {
  const active = document.activeElement;
  // A choice is drawn by the text beside it.
  const drawn = active.matches("input") ? active.nextElementSibling : active;
  return [active.className || active.id || active.value || active.textContent, getComputedStyle(drawn).outlineStyle];
}"""


async def test_the_keyboard_reaches_everything_in_order_and_shows_where_it_is(visiting: Visiting, head: str) -> None:
    async with visiting(head) as visit:
        await visit.sees("nothing is wrong")
        order = []
        for _ in range(9):
            await visit.page.keyboard.press("Tab")
            name, outline = await visit.page.evaluate(FOCUSED)
            assert outline == "solid", f"{name} does not show that it has the focus"
            order.append(name)
        assert order[:3] == ["skip", "pause", "300"]
        assert order[3:6] == ["As a table"] * 3
        assert order[6:] == ["3 workers", "scroll", "1 worker"]
        await visit.page.locator(".skip").focus()
        await visit.page.keyboard.press("Enter")
        assert await visit.page.evaluate("document.activeElement.id") == "main"


async def test_pause_holds_the_figures_until_it_is_lifted(
    visiting: Visiting, head: str, counter: FiguresServer
) -> None:
    async with visiting(head) as visit:
        await visit.sees("nothing is wrong")
        await visit.page.keyboard.press("Tab")
        await visit.page.keyboard.press("Tab")
        await visit.page.keyboard.press("Space")
        await visit.sees("paused at", "#live")
        counter.change(0, sessions_open=60)
        await until_known(head, 60)
        assert await visit.text(cell("counter", 0, 3)) == "10"
        await visit.page.keyboard.press("Space")
        await visit.shows(cell("counter", 0, 3), "60")


async def test_an_answer_that_was_under_way_does_not_end_a_pause(
    visiting: Visiting, head: str, counter: FiguresServer
) -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def hold(route: Route) -> None:
        asked.set()
        await may_answer.wait()
        await route.continue_()

    async with visiting(head) as visit:
        await visit.sees("nothing is wrong")
        await visit.page.route("**/dashboard/data", hold)
        await asyncio.wait_for(asked.wait(), 60)
        counter.change(0, sessions_open=60)
        await visit.page.locator("#pause").click()
        await until_known(head, 60)
        async with visit.page.expect_response("**/dashboard/data") as reply:
            may_answer.set()
        await (await reply.value).finished()
        await visit.page.evaluate("new Promise((resolve) => setTimeout(resolve))")
        assert (await visit.text("#live")).startswith("paused at")
        assert await visit.text(cell("counter", 0, 3)) == "10"


async def test_charts_have_their_data_as_text_and_as_a_table(visiting: Visiting, head: str) -> None:
    async with visiting(head) as visit:
        await visit.sees("nothing is wrong")
        chart = visit.page.get_by_role("img", name="Sessions open")
        assert "counter: 33" in await chart.locator("desc").text_content()
        await visit.page.locator("#charts summary").first.click()
        table = visit.page.get_by_role("region", name="Sessions open, as a table")
        assert await table.locator("thead th").all_text_contents() == ["time", "counter", "agent"]
        assert "33" in await table.locator("tbody tr td").first.inner_text()


async def test_text_stands_out_in_the_light_and_in_the_dark_and_nothing_moves_where_that_is_wished(
    visiting: Visiting, head: str
) -> None:
    async with visiting(head, reduced_motion="reduce") as visit:
        await visit.sees("nothing is wrong")
        for scheme in ("light", "dark"):
            await visit.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            for selector in (".muted", ".tile dt", ".pill", "#verdict-title", "h2", "thead th", "summary"):
                assert await visit.page.locator(selector).first.evaluate(CONTRAST) >= 4.5, f"{selector}, {scheme}"
        assert (
            await visit.page.locator("#live").evaluate("it => getComputedStyle(it, '::before').animationName") == "none"
        )


CONTRAST = """element => {
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((one) => one / 255)
    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, place) => sum + one * [0.2126, 0.7152, 0.0722][place], 0);
  let ground = element;
  const back = (it) => parts(getComputedStyle(it).backgroundColor);
  while (back(ground).length === 4 && back(ground)[3] === 0) ground = ground.parentElement;
  const pair = [light(parts(getComputedStyle(element).color)), light(back(ground))].sort((a, b) => b - a);
  return (pair[0] + 0.05) / (pair[1] + 0.05);
}"""

"""Reports in a real browser: plots, search, filters, the reader, two runs, hostile texts, ten thousand rollouts.

Skipped, with the reason told, where playwright or a Chromium is missing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.reports.report import write_report
from tests.report_rollouts import call, failure, many, message, result_of, rollout, write

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the browser tests need chromium on the PATH")
PATIENCE_MS = 180_000

HOSTILE = "</script><script>globalThis.hacked=1</script><img src=x onerror=globalThis.hacked=2>\u2028<b>bold</b> &amp;"
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGBgAAAABQABh6FO1AAAAABJRU5ErkJggg=="  # noqa: E501


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright.expect.set_options(timeout=PATIENCE_MS)
    with playwright.sync_playwright() as api:
        # Chromium's own sandbox refuses to work for root, as in a container.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        started = api.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield started
        started.close()


class Shown:
    """A report that is open in the browser, and all that must not have happened in it."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1400, "height": 1000}, **context})
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.troubles: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda told: self.troubles.append(f"{told.type}: {told.text}"))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready=all]")

    def expect_text(self, selector: str, text: str) -> None:
        playwright.expect(self.page.locator(selector)).to_have_text(text)

    def expect_count(self, selector: str, count: int) -> None:
        playwright.expect(self.page.locator(selector)).to_have_count(count)

    def open_first(self) -> Any:
        self.page.locator("#list .row").first.click()
        return self.page.locator("#opened .rollout").first

    def close(self) -> None:
        images = [url for url in self.requests[1:] if url.startswith("data:image/")]
        self.context.close()
        assert self.troubles == []
        assert self.requests[1:] == images, "the page asked for something"


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Any]:
    opened: list[Shown] = []

    def shower(*runs: Any, **context: Any) -> Shown:
        paths = [
            write(tmp_path / f"{'ab'[at]}.jsonl", *(run if isinstance(run, tuple) else (run,)))
            for at, run in enumerate(runs)
        ]
        report = write_report(paths, tmp_path / "report.html")
        opened.append(Shown(browser, report.path, **context))
        return opened[-1]

    yield shower
    for page in opened:
        page.close()


def test_plots_search_filters_and_reader_of_one_run(show: Any) -> None:
    told = {"total": 1.5, "model": 1.0, "tools": 0.3, "seed": 0.05, "verify": 0.1}
    records = [
        rollout(task, index, float(index % 2), tokens=10 * task + index, _ng_rollout_seconds=told)
        for task in range(12)
        for index in range(4)
    ]
    records[5]["response"]["output"] = [call("look", '{"at": 12345678901234567890}'), result_of("a rare Thing\nhere")]
    shown = show((records, [failure(12, reason="the sun went down"), failure(13, kind="session_lost")]))
    page = shown.page
    figures = page.locator("figure .plot svg.main-svg >> nth=0")
    assert figures.count() > 0
    shown.expect_count("figure:has(svg.main-svg)", 6)
    for figure in ("rewards", "passrates", "failures"):
        assert page.locator(f"#plot-{figure} .bars path").count() > 0
    shown.expect_text("#found", "50 rollouts")

    page.keyboard.press("/")
    page.keyboard.type("a RARE thing")
    shown.expect_text("#found", "1 of 50 rollouts")
    opened = shown.open_first()
    playwright.expect(opened.locator(".item.call")).to_contain_text("12345678901234567890")
    playwright.expect(opened.locator(".item.result")).to_contain_text("a rare Thing")
    assert page.evaluate("CSS.highlights.get('found').size") == 1

    page.locator("#query").fill("")
    page.get_by_label("Outcome", exact=True).select_option("failed")
    shown.expect_text("#found", "2 of 50 rollouts")
    page.get_by_label("Failure", exact=True).select_option("timeout")
    shown.expect_text("#found", "1 of 50 rollouts")
    playwright.expect(shown.open_first()).to_contain_text("the sun went down")

    page.get_by_role("button", name="Clear").click()
    shown.expect_text("#found", "50 rollouts")
    bar = page.locator("#plot-failures .bars path").first
    bar.scroll_into_view_if_needed()
    box = bar.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    shown.expect_text("#found", "1 of 50 rollouts")
    page.get_by_role("button", name="Clear").click()
    page.get_by_label("Least reward").fill("1")
    shown.expect_text("#found", "24 of 50 rollouts")
    page.get_by_role("button", name="Clear").click()
    page.locator("#task-table .task-body .link").first.click()
    shown.expect_text("#found", "4 of 50 rollouts")
    assert page.locator("#opened .sibling").count() == 4


def test_the_keyboard_goes_through_the_rollouts_and_a_narrow_window_has_room(show: Any) -> None:
    shown = show([rollout(task) for task in range(40)], viewport={"width": 400, "height": 800}, color_scheme="dark")
    page = shown.page
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.locator("#list").focus()
    page.keyboard.press("ArrowDown")
    playwright.expect(page.locator("#opened h3")).to_have_text("task 0 · row-0")
    page.keyboard.press("j")
    playwright.expect(page.locator("#opened h3")).to_have_text("task 1 · row-1")
    assert not page.locator("#list").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.keyboard.press("Escape")
    playwright.expect(page.locator("#list")).to_be_visible()
    page.keyboard.press("End")
    playwright.expect(page.locator("#opened h3")).to_have_text("task 39 · row-39")
    page.get_by_role("button", name="Light").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(244, 246, 248)"


def test_two_runs_are_compared_and_read_side_by_side(show: Any) -> None:
    first = [rollout(task, index, float(task % 3 == 0)) for task in range(30) for index in range(3)]
    second = [
        rollout(task, index, float(task % 3 != 1), output=[message("assistant", f"second {task} {index}")])
        for task in range(30)
        for index in range(2)
    ]
    shown = show(first, second)
    page = shown.page
    shown.expect_text(".verdict strong.good", "10 better")
    shown.expect_text(".verdict strong.bad", "0 worse")
    row = page.locator(".comparison tr", has_text="mean reward")
    playwright.expect(row.locator("td").nth(2)).to_contain_text("+0.3333 ●")
    assert page.locator("#plot-differences .bars path").count() == 30
    page.get_by_label("Change", exact=True).select_option("better")
    playwright.expect(page.locator("#task-controls [role=status]")).to_have_text("10 of 30 tasks")
    page.locator("#task-table .task-body .link").first.click()
    shown.expect_count("#opened .rollout", 2)
    columns = page.locator("#opened .rollout")
    playwright.expect(columns.nth(0)).to_contain_text("answer 0 to task 2")
    playwright.expect(columns.nth(1)).to_contain_text("second 2 0")
    columns.nth(1).locator(".sibling").nth(1).click()
    playwright.expect(columns.nth(1)).to_contain_text("second 2 1")
    playwright.expect(columns.nth(0)).to_contain_text("answer 0 to task 2")
    shown.expect_text("#found", "5 of 150 rollouts")


def test_hostile_texts_and_all_kinds_of_items_are_shown_as_text(show: Any) -> None:
    kinds = [
        message("assistant", HOSTILE),
        {
            "type": "message",
            "role": HOSTILE,
            "content": [{"type": "refusal", "refusal": "I refuse"}, {"type": "x", "y": 1}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": PIXEL}]},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_image", "image_url": "https://example.com/a.png"}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_image", "image_url": "data:image/svg+xml,<svg/>"}],
        },
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I think"}], "encrypted_content": "abc"},
        call(HOSTILE, "{not json"),
        result_of(HOSTILE),
        result_of("of nothing", "call_unknown"),
        {"type": "mcp_call", "server_label": "files", "name": "read", "arguments": "{}", "error": {"message": "no"}},
        {"type": "web_search_call", "action": {"query": "rivers"}, "status": "failed"},
        {"type": "code_interpreter_call", "code": "1 + 1", "outputs": [{"type": "logs", "logs": "2"}]},
        {"type": "custom_tool_call", "name": "patch", "input": "free text", "call_id": "c2"},
        {"type": "computer_call_output", "call_id": "c3", "output": {"type": "screenshot", "image_url": PIXEL}},
        {"type": HOSTILE, "thing": [1, {"deep": HOSTILE}]},
        {"type": ["no", "string"]},
        {"role": "tool", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        "a bare string",
        None,
        [1, 2],
    ]
    bad = rollout(0, output=kinds, id=HOSTILE, asked=HOSTILE, note={"a": HOSTILE})
    bad["agent_ref"]["name"] = HOSTILE
    shown = show(([bad, rollout(1, reward=0.0)], [failure(2, kind=HOSTILE, reason=HOSTILE)]))
    page = shown.page
    opened = shown.open_first()
    playwright.expect(opened.locator(".item")).to_have_count(len(kinds) + 1)
    for text in (
        "I refuse",
        "I think",
        "{not json",
        "of no call",
        "files.read",
        "rivers",
        "1 + 1",
        "free text",
        "a bare string",
    ):
        playwright.expect(opened).to_contain_text(text)
    playwright.expect(opened.locator(".item.message").first).to_contain_text(HOSTILE.replace("\u2028", "")[:40])
    assert opened.locator("img").count() == 2
    assert page.evaluate("globalThis.hacked") is None
    assert page.locator("#opened b, #opened script, #plots b").count() == 0
    for summary in page.locator("#opened details > summary").all():
        summary.click()
    page.get_by_label("Outcome", exact=True).select_option("failed")
    playwright.expect(shown.open_first()).to_contain_text("<b>bold</b>")
    page.locator("#query").fill("onerror=globalThis.hacked")
    shown.expect_text("#found", "1 of 3 rollouts")
    assert page.evaluate("globalThis.hacked") is None


def test_ten_thousand_rollouts_are_listed_searched_and_read(show: Any) -> None:
    shown = show(many(10_000, words=30))
    page = shown.page
    shown.expect_text("#found", "10,000 rollouts")
    assert 0 < page.locator("#list .row").count() < 60
    page.locator("#query").fill("needle")
    shown.expect_text("#found", "10 of 10,000 rollouts")
    shown.expect_count("#list .row", 10)
    playwright.expect(shown.open_first().locator(".item.result")).to_contain_text("needle")
    page.locator("#query").fill("")
    shown.expect_text("#found", "10,000 rollouts")
    page.locator("#list").focus()
    page.keyboard.press("End")
    playwright.expect(page.locator("#opened h3")).to_have_text("task 999 · row-999")
    assert page.locator("#list .row").count() < 60
    assert page.locator("#task-table .task-body .task-row").count() < 60
    assert page.locator("#plots path.point").count() < 10_000


def test_a_file_that_is_not_whole_says_so(browser: Any, tmp_path: Path) -> None:
    report = write_report([write(tmp_path / "a.jsonl", [rollout(0)])], tmp_path / "report.html").path
    text = report.read_text(encoding="utf-8")
    report.write_text(text[: text.index('id="plotly"') + 5_000], encoding="utf-8")
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(report.as_uri())
    playwright.expect(page.locator("#trouble")).to_contain_text("This report can't be shown")
    page.close()

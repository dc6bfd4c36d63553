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
NO_PLOTS = "globalThis.Plotly = { react: async (plot) => Object.assign(plot, { on() {}, removeAllListeners() {} }) };"
"""In the place of plotly.js, which takes seconds to begin, where a test is not about plots."""

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
        self.address = path.as_uri()
        self.context = browser.new_context(**{"viewport": {"width": 1400, "height": 1000}, **context})
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.troubles: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda told: self.troubles.append(f"{told.type}: {told.text}"))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(self.address)
        self.page.wait_for_selector("html[data-ready=all]")

    def expect_text(self, selector: str, text: str) -> None:
        playwright.expect(self.page.locator(selector)).to_have_text(text)

    def expect_count(self, selector: str, count: int) -> None:
        playwright.expect(self.page.locator(selector)).to_have_count(count)

    def open_first(self) -> Any:
        self.page.locator("#list .row").first.click()
        return self.page.locator("#opened .rollout").first

    def close(self) -> None:
        self.context.close()
        assert self.troubles == []
        asked = [url for url in self.requests if url != self.address and not url.startswith("data:image/")]
        assert asked == [], "the page asked for something"


@pytest.fixture
def show(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    opened: list[Shown] = []

    def shower(*runs: Any, plots: bool = True, **context: Any) -> Shown:
        if not plots:
            monkeypatch.setattr("nemo_gym.reports.page.get_plotlyjs", lambda: NO_PLOTS)
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
    page.get_by_role("grid").focus()
    for key in ("ArrowDown", "End", "ArrowUp", "Enter"):
        page.keyboard.press(key)
    playwright.expect(page.locator("#opened h3")).to_have_text("task 38 · row-38")
    shown.expect_text("#found", "1 of 40 rollouts")
    page.get_by_role("grid").focus()
    page.keyboard.press("Tab")
    while page.evaluate("document.activeElement.closest('.task-head') !== null"):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "query"
    page.get_by_role("button", name="Light").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(244, 246, 248)"
    page.get_by_role("button", name="Dark").click()
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(29, 39, 51)"
    assert page.evaluate("getComputedStyle(document.querySelector('.plot text')).fill") == "rgb(29, 39, 51)"


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
    assert page.evaluate(
        "document.querySelector('.scroll').scrollWidth <= document.querySelector('.scroll').clientWidth"
    )
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


def test_names_that_mean_something_to_the_language_and_odd_shapes_are_shown_too(show: Any) -> None:
    odd = {"toString": 1, "valueOf": 2, "toLocaleString": 3}
    items = [
        call("__proto__", "{}", "__proto__") | {"__proto__": {"hidden": "under __proto__"}, "constructor": "a builder"},
        result_of("of a call", "__proto__"),
        {"type": "function_call", "name": odd, "arguments": odd, "call_id": odd},
        {"type": "function_call_output", "call_id": odd, "output": "of an odd call"},
        {"type": "reasoning", "summary": {"text": "a summary of its own shape"}, "encrypted_content": {"no": "string"}},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": odd}, *[{"text": f"part {n}"} for n in range(900)]],
        },
        {"type": "function_call_output", "call_id": "deep", "output": '{"a":' * 3000 + "1" + "}" * 3000},
    ]
    bad = rollout(0, output=items, __proto__="a field", hasOwnProperty=1, **{f"f{n}": n for n in range(900)})
    bad["responses_create_params"]["tools"] = [{"name": odd}, None, *[{"name": f"tool_{n}"} for n in range(900)]]
    shown = show(([bad], [failure(1, kind="__proto__") | {"status": odd, "attempts": odd, "reason": odd}]), plots=False)
    opened = shown.open_first()
    playwright.expect(opened.locator(".item")).to_have_count(len(items) + 1)
    for summary in opened.locator("details > summary").all():
        summary.click()
    for text in ("under __proto__", "of an odd call", "a summary of its own shape", '"no": "string"', "a field"):
        playwright.expect(opened).to_contain_text(text)
    playwright.expect(opened).not_to_contain_text("part 300")
    opened.get_by_role("button", name="more parts").click()
    playwright.expect(opened).to_contain_text("part 300")
    shown.page.get_by_label("Outcome", exact=True).select_option("failed")
    playwright.expect(shown.open_first()).to_contain_text('"toString":1')
    assert shown.page.evaluate("({}).hidden") is None


def test_an_address_and_a_click_lead_to_a_rollout_whatever_is_filtered(show: Any) -> None:
    shown = show([rollout(task, index, reward=task % 2) for task in range(20) for index in range(2)], plots=False)
    page = shown.page
    playwright.expect(page.locator("#opened h3")).to_have_count(0)
    page.evaluate("location.hash = '#rollout-0-31'")
    playwright.expect(page.locator("#opened h3")).to_have_text("task 15 · row-15")
    playwright.expect(page.locator("#reader")).to_be_in_viewport()
    page.evaluate("scrollTo(0, 0)")
    page.reload()
    playwright.expect(page.locator("#opened h3")).to_have_text("task 15 · row-15")
    playwright.expect(page.locator("#opened")).to_be_in_viewport()
    page.locator("#query").fill("no text has this")
    shown.expect_text("#found", "0 of 40 rollouts")
    page.locator("#task-table .task-body .link").first.click()
    shown.expect_text("#found", "2 of 40 rollouts")
    page.get_by_role("button", name="Clear").click()
    page.locator("#task-filter").fill("1")
    shown.expect_text("#found", "2 of 40 rollouts")
    page.locator("#task-filter").fill("row-1")
    shown.expect_text("#found", "22 of 40 rollouts")
    page.evaluate("location.hash = '#rollout-0-4'")
    shown.expect_text("#found", "40 rollouts")


def test_nearly_all_is_not_shown_as_all(show: Any) -> None:
    records = [rollout(task, reward=0.99999 if task == 0 else 1) for task in range(2500)]
    shown = show([*records, *[rollout(0, index, reward=0.99999) for index in range(1, 5)]], plots=False)
    for name, value in (("pass rate", "99.96 %"), ("output tokens", "10"), ("mean reward", "1")):
        card = shown.page.locator(".card", has_text=name)
        playwright.expect(card.locator(".card-value")).to_have_text(value)
    playwright.expect(shown.page.locator("#list .row .badge").first).to_have_text("✗ 0.99999")
    # Five tries are known of one task only.
    shown.expect_count(".card:has-text('pass@')", 0)


def test_runs_without_a_common_task_say_of_how_many_tasks_they_are(show: Any) -> None:
    second = [rollout(100 + task, reward=0.5) for task in range(3)]
    shown = show(([rollout(0), rollout(1)], [failure(2)]), second, plots=False)
    summary = shown.page.locator("#summary")
    playwright.expect(summary).to_contain_text("independent samples of 2 and 3 tasks with rewards")
    playwright.expect(summary).to_contain_text("no interval: all tasks of a run are the same")
    playwright.expect(shown.page.locator("#notices")).to_contain_text("With fewer than 30 tasks")


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

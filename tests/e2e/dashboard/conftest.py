"""A real browser; where there is none, the tests say so and are skipped."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page, Request

PERMISSION = "NEMO_GYM_MULTIWORKER_E2E"
PATIENCE_MS = 60_000
# The page looks at once when it comes into view; so a test need not wait for its next look. And an answer may take any
# time: a busy machine, or a test that holds the answer, is no head server that hangs.
IMPATIENCE = """
setInterval(() => document.dispatchEvent(new Event("visibilitychange")), 100);
AbortSignal.timeout = () => new AbortController().signal;
"""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    if os.environ.get(PERMISSION) != "1":
        pytest.skip(f"starts a browser and server processes; set {PERMISSION}=1 to run it")
    api = pytest.importorskip("playwright.async_api", reason="NO PLAYWRIGHT: the dashboard is not tested")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"NO BROWSER: the dashboard is not tested; install one of {', '.join(BROWSERS)}")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        await browser.close()


class Visit:
    """The dashboard in a browser, and what went wrong in it.

    Args:
        page: The page.
        url: Its address.
    """

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._note_request)

    def _note_request(self, request: Request) -> None:
        if urlsplit(request.url).netloc != urlsplit(self.url).netloc:
            self.elsewhere.append(request.url)

    async def sees(self, text: str, within: str = "body") -> None:
        """Wait until a text is on the page."""
        await self.page.locator(within).get_by_text(text).first.wait_for()

    async def shows(self, selector: str, text: str | re.Pattern[str]) -> None:
        """Wait until an element has a text."""
        expect: Any = pytest.importorskip("playwright.async_api").expect
        await expect(self.page.locator(selector)).to_have_text(text, timeout=PATIENCE_MS)

    async def text(self, selector: str) -> str:
        """Return the text of an element as it is shown."""
        return await self.page.locator(selector).inner_text()


@pytest.fixture
def visiting(browser: Browser) -> object:
    @asynccontextmanager
    async def visit(url: str, *, width: int = 1280, may_fail: bool = False, **settings: object) -> AsyncIterator[Visit]:
        context = await browser.new_context(viewport={"width": width, "height": 900}, **settings)
        await context.add_init_script(IMPATIENCE)
        page = await context.new_page()
        visit = Visit(page, url)
        try:
            await page.goto(url)
            yield visit
            assert visit.elsewhere == []
            assert may_fail or visit.errors == []
        finally:
            await context.close()

    return visit

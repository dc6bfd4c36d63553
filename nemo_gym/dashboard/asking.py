"""Asks one server for its figures."""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp
import orjson

from nemo_gym.server.figures import ServerFigures

TIMEOUT_S: Final = 4.0
SECOND_TRY_AFTER_S: Final = 1.0


class NoFiguresError(Exception):
    """Raised when a server serves and does not show its figures."""


class NoAnswerError(Exception):
    """Raised when a server does not answer as a server should; the text says how."""


async def ask_server(session: aiohttp.ClientSession, url: str) -> ServerFigures:
    """Return the figures of all workers of a server.

    A worker whose event loop is blocked may hold a connection without answering. So a second connection, which
    another worker may take, is tried after a second; the first answer counts.

    Args:
        session: One that does not keep connections, for those would stay with one worker.
        url: The server's address.

    Raises:
        NoFiguresError: It serves, but shows no figures.
        NoAnswerError: It does not serve.
    """
    tries = [asyncio.create_task(_ask(session, url))]
    try:
        done, _ = await asyncio.wait(tries, timeout=SECOND_TRY_AFTER_S)
        if not done:
            tries.append(asyncio.create_task(_ask(session, url)))
            await asyncio.wait(tries, return_when=asyncio.FIRST_COMPLETED)
        ended = [one for one in tries if one.done()]
        answered = [one for one in ended if one.exception() is None]
        return (answered or ended)[0].result()
    finally:
        for one in tries:
            one.cancel()
        await asyncio.gather(*tries, return_exceptions=True)


async def _ask(session: aiohttp.ClientSession, url: str) -> ServerFigures:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            status, body = await _get(session, f"{url}/workers")
            if status == 200:
                return ServerFigures.from_json(orjson.loads(body))
            status, _ = await _get(session, f"{url}/health")
    except TimeoutError as error:
        raise NoAnswerError(f"no answer in {TIMEOUT_S:g} s") from error
    except aiohttp.ClientConnectorError as error:
        raise NoAnswerError("not listening") from error
    except aiohttp.ClientError as error:
        raise NoAnswerError(f"{type(error).__name__}: {error}") from error
    except (AttributeError, TypeError, ValueError) as error:
        # A server may have a route of its own at this path.
        raise NoFiguresError from error
    if status == 200:
        raise NoFiguresError
    raise NoAnswerError(f"/health answered {status}")


async def _get(session: aiohttp.ClientSession, url: str) -> tuple[int, bytes]:
    async with session.get(url, allow_redirects=False) as response:
        return response.status, await response.read()

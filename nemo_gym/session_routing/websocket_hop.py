"""The hop of a WebSocket: messages, close codes and refusals between a client here and its session's owner.

Each of the two connections has its own framing, compression and pings. What passes is what ASGI knows of: the
upgrade request, its acceptance or refusal, whole messages, and how each side ended. Back-pressure comes from the
two connections: a message is taken from one side when the other has taken the one before.

Failure policy: an end that the owner did not declare never looks like a normal one. The client then gets close code
1012 when the owner is gone, 1011 when it still runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

import aiohttp
from aiohttp import WSMsgType
from starlette.types import Message, Receive, Scope, Send

from nemo_gym.session_routing.hop import end_to_end_headers, outgoing_headers, owner_url
from nemo_gym.session_routing.owner_pool import OwnerPool, OwnerWebSocket, UpgradeRefusedError
from nemo_gym.session_routing.owner_socket import NoReplyError, OwnerGoneError

CLOSE_WORKER_GONE: Final = 1012
"""The close code when the owner was lost: "service restart" in IANA's registry."""

CLOSE_BROKEN_OFF: Final = 1011
"""The close code when an owner that still runs broke the connection off: "unexpected condition" in RFC 6455."""

_NORMAL_CLOSURE: Final = 1000
_NEVER_SENT: Final = frozenset({1005, 1006, 1015})  # RFC 6455 section 7.4.1: they tell of a close that is missing
_CLOSE_SECONDS: Final = 10.0  # how long the owner's answer to the client's close is waited for
_PROTOCOL_HEADER: Final = "sec-websocket-protocol"
# The receiving server has a key and extensions of its own; the protocol is a field of the accept message.
_OF_ONE_HANDSHAKE: Final = frozenset({b"sec-websocket-accept", b"sec-websocket-extensions", b"sec-websocket-protocol"})


async def forward_websocket(pool: OwnerPool, scope: Scope, receive: Receive, send: Send) -> None:
    """Forward one WebSocket, from its upgrade to its end.

    Args:
        pool: The connections to the owner.
        scope: The WebSocket's scope.
        receive: Its ASGI receive.
        send: Its ASGI send.

    Raises:
        OwnerGoneError: Before anything was sent to the client.
        NoReplyError: Before anything was sent to the client.
        OutOfDescriptorsError: Before anything was sent to the client.
    """
    await receive()  # websocket.connect
    await _Relay(pool, scope, receive, send).run()


class _Relay:
    """One WebSocket's two directions, each a task, from the request for the upgrade on."""

    def __init__(self, pool: OwnerPool, scope: Scope, receive: Receive, send: Send) -> None:
        self._pool = pool
        self._scope = scope
        self._receive = receive
        self._send = send
        self._opening = asyncio.create_task(self._open())
        self._client_left = False

    async def run(self) -> None:
        """Return when one side has ended and the other knows it."""
        from_client = asyncio.create_task(self._client_to_owner())
        from_owner = asyncio.create_task(self._owner_to_client())
        tasks: tuple[asyncio.Task[Any], ...] = (self._opening, from_client, from_owner)
        try:
            await asyncio.wait((from_client, from_owner), return_when=asyncio.FIRST_COMPLETED)
            if from_owner.done() and from_owner.result():
                return
            await self._leave(await from_client)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._break_off()

    async def _open(self) -> OwnerWebSocket:
        """Ask the owner for the upgrade.

        The owner is not pinged, as it may be busy for long; the receiving server pings the client and limits the
        size of messages.
        """
        try:
            owner = await self._pool.session.ws_connect(
                owner_url(self._scope),
                headers=_upgrade_headers(self._scope),
                max_msg_size=0,
                timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_SECONDS),
            )
        except (NoReplyError, aiohttp.ClientError) as error:
            if not await self._pool.still_listens():
                raise OwnerGoneError(may_have_run=True) from error
            raise NoReplyError(str(error)) from error
        assert isinstance(owner, OwnerWebSocket)
        return owner

    async def _client_to_owner(self) -> Message:
        """Pass the client's messages on; return the event that tells how the client left."""
        while (message := await self._receive())["type"] != "websocket.disconnect":
            await asyncio.wait((self._opening,))
            # That the owner refused, has closed or is lost shows in the other direction.
            if (owner := self._owner()) is None:
                continue
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                if (text := message.get("text")) is not None:
                    await owner.send_str(text)
                else:
                    await owner.send_bytes(message["bytes"])
        self._client_left = True
        return message

    async def _owner_to_client(self) -> bool:
        """Pass the owner's answer and messages on; tell whether it is the owner's side that has ended."""
        try:
            owner = await self._opening
        except UpgradeRefusedError as refusal:
            await self._refuse(refusal.reply)
            return True
        try:
            await self._send(_accept(owner.opening))
            while True:
                message = await owner.receive()
                if message.type is WSMsgType.TEXT:
                    await self._send({"type": "websocket.send", "text": message.data})
                elif message.type is WSMsgType.BINARY:
                    await self._send({"type": "websocket.send", "bytes": message.data})
                elif self._client_left:
                    return False
                else:
                    await self._send(await self._how_it_ended(message))
                    return True
        except OSError:  # what a server raises from send when the client has gone
            return False

    async def _how_it_ended(self, message: aiohttp.WSMessage) -> Message:
        if message.type is WSMsgType.CLOSE:
            code, reason = message.data or _NORMAL_CLOSURE, message.extra or ""
        elif await self._pool.still_listens():
            code, reason = CLOSE_BROKEN_OFF, "the session's worker broke off the connection"
        else:
            code, reason = CLOSE_WORKER_GONE, "the session's worker is gone"
        return {"type": "websocket.close", "code": code, "reason": reason}

    async def _refuse(self, reply: aiohttp.ClientResponse) -> None:
        """Pass the owner's reply to the upgrade on, whole where the receiving server can, else as its own refusal."""
        if "websocket.http.response" not in self._scope.get("extensions", {}):
            await self._send({"type": "websocket.close", "code": _NORMAL_CLOSURE, "reason": ""})
            return
        try:
            body = await reply.read()
        except aiohttp.ClientError as error:
            raise NoReplyError(str(error)) from error
        headers = end_to_end_headers(reply.raw_headers)
        await self._send({"type": "websocket.http.response.start", "status": reply.status, "headers": headers})
        await self._send({"type": "websocket.http.response.body", "body": body})

    async def _leave(self, left: Message) -> None:
        """Tell the owner that the client has left, and how; a connection that just vanished does so here too."""
        code = left.get("code", _NORMAL_CLOSURE)
        if (owner := self._owner()) is not None and code not in _NEVER_SENT:
            await owner.close(code=code, message=(left.get("reason") or "").encode())

    def _owner(self) -> OwnerWebSocket | None:
        opened = self._opening.done() and not self._opening.cancelled() and self._opening.exception() is None
        return self._opening.result() if opened else None

    def _break_off(self) -> None:
        """Close the connection to the owner, if it is still open, without a close frame."""
        if (owner := self._owner()) is not None:
            owner.opening.close()
        elif not self._opening.cancelled() and isinstance(error := self._opening.exception(), UpgradeRefusedError):
            error.reply.close()


def _upgrade_headers(scope: Scope) -> list[tuple[str, str]]:
    headers = outgoing_headers(scope)
    # Some servers take this header out of the scope's, and leave only what it says.
    if (offered := scope.get("subprotocols")) and all(name != _PROTOCOL_HEADER for name, _ in headers):
        headers.append((_PROTOCOL_HEADER, ", ".join(offered)))
    return headers


def _accept(opening: aiohttp.ClientResponse) -> Message:
    headers = end_to_end_headers(opening.raw_headers)
    return {
        "type": "websocket.accept",
        "subprotocol": opening.headers.get(_PROTOCOL_HEADER),
        "headers": [(name, value) for name, value in headers if name.lower() not in _OF_ONE_HANDSHAKE],
    }

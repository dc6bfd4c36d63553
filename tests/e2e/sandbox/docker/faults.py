"""What a daemon does instead of answering properly, for `StandIn.faults`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tests.e2e.sandbox.docker.engine_stand_in import Call, answer


async def hang(call: Call) -> bool:
    """A daemon that takes the call and says nothing."""
    await call.reader.read()
    return True


async def hang_up(call: Call) -> bool:
    """A daemon that dies in the middle of its answer."""
    call.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{")
    await call.writer.drain()
    return True


async def mumble(call: Call) -> bool:
    """A daemon that answers what makes no sense."""
    call.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n<ok>")
    await call.writer.drain()
    return True


def refuse(status: int, message: str) -> Callable[[Call], Awaitable[bool]]:
    async def fault(call: Call) -> bool:
        await answer(call, {"message": message}, status)
        return True

    return fault

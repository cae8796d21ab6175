"""A link that takes its time: relays TCP connections and delivers every byte some seconds later.

    python -m tests.slow_link HOST PORT SECONDS

prints the port on which it listens. Bandwidth is not limited, order is kept.
"""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CHUNK_BYTES = 1 << 18


async def _relay(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float
) -> None:
    loop = asyncio.get_running_loop()
    due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            at, data = await due.get()
            await asyncio.sleep(max(0.0, at - loop.time()))
            if not data:
                writer.close()
                return
            writer.write(data)
            await writer.drain()

    delivery = asyncio.create_task(deliver())
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            due.put_nowait((loop.time() + delay_s, data))
    due.put_nowait((loop.time() + delay_s, b""))
    with contextlib.suppress(OSError):
        await delivery


async def serve(host: str, port: int, delay_s: float) -> None:
    """Relay to host:port until killed."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, port)
        there = _relay(reader, there_writer, delay_s)
        back = _relay(there_reader, writer, delay_s)
        await asyncio.gather(there, back)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def slow_link(address: str, delay_s: float) -> Iterator[str]:
    """Lend an address, host:port, behind which `address` is `delay_s` away in each direction."""
    host, _, port = address.rpartition(":")
    command = [sys.executable, "-m", "tests.slow_link", host, port, str(delay_s)]
    root = Path(__file__).parents[1]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
    try:
        assert process.stdout is not None
        yield f"127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))

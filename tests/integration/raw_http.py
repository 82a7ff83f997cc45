"""Bytes to an api process as no client library would send them."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from tests.integration.api_ring import Api


async def raw(api: Api, data: bytes) -> bytes:
    """Sends bytes on a connection of their own, and reads until the server closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(api.url).port)
    try:
        writer.write(data)
        await writer.drain()
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()

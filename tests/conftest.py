"""Runs every `async def` test marked `both_backends` on asyncio and on trio."""

"""Handlers that live as long as one job and see only its messages."""

import asyncio

from msgbus import Command, Context, Event, MessageBus


class ImportFile(Command[int]):
    """Import a file; the reply is its number of rows."""

    path: str


class RowImported(Event):
    """One row is in the database."""

    row: int


bus = MessageBus()


@bus.handles(ImportFile)
async def import_file(command: ImportFile, context: Context) -> int:
    rows = len(command.path)
    for row in range(rows):
        await context.publish(RowImported(row=row))
    return rows


async def import_with_progress(path: str) -> str:
    seen: list[int] = []

    async def remember(event: RowImported) -> None:
        seen.append(event.row)

    async with bus.session(f"import-{path}") as session:
        session.subscribe(RowImported, remember)
        rows = await session.call(ImportFile(path=path))
    # The session is over: its events are handled, and its handler is gone.
    return f"{path}: {len(seen)} of {rows} rows seen"


async def main() -> None:
    async with bus:
        # Two jobs at once on one bus; neither sees the other's rows.
        for line in await asyncio.gather(import_with_progress("a.csv"), import_with_progress("bb")):
            print(line)
        print("handlers left:", bus.stats().registered_handlers)


asyncio.run(main())
# Output:
# > a.csv: 5 of 5 rows seen
# > bb: 2 of 2 rows seen
# > handlers left: 1

"""What a caller gets: a value, the handler's own exception, or a refusal."""

import asyncio

from msgbus import Command, MessageBus, MissingHandlerError, Refusal


class Withdraw(Command[int]):
    """Take money out; the reply is what is left."""

    amount: int


class CloseAccount(Command):
    """Nobody handles this one."""


class NotEnoughMoney(Refusal):
    """An expected answer of the business: nothing broke."""


bus = MessageBus()


@bus.handles(Withdraw)
async def withdraw(command: Withdraw) -> int:
    if command.amount < 0:
        raise ValueError("negative amount; password=hunter2")
    if command.amount > 100:
        raise NotEnoughMoney("only 100 left")
    return 100 - command.amount


async def main() -> None:
    async with bus:
        # The result of `execute` has what the handler raised, secrets removed.
        for amount in (30, 500, -1):
            result = await bus.execute(Withdraw(amount=amount))
            print(result.success, result.value, result.error)

        try:  # `call`, as `result.unwrap()`, raises the handler's own exception
            await bus.call(Withdraw(amount=500))
        except NotEnoughMoney as refusal:
            print("refused:", refusal)

        try:  # a mistake in the program, rather than in the handler, raises at once
            await bus.execute(CloseAccount())
        except MissingHandlerError as error:
            print(str(error).partition(".")[0])


asyncio.run(main())
# Output:
# > True 70 None
# > False None NotEnoughMoney: only 100 left
# > False None ValueError: negative amount; password=[redacted]
# > refused: only 100 left
# > No handler for CloseAccount

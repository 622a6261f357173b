"""Messages by id, by flow, by any field; deliveries."""

from __future__ import annotations

from typing import Any

from msgbus.journal import operations as op
from msgbus.journal.records import (
    DeliveryRecord,
    Kind,
    Outcome,
    Page,
    Record,
)
from msgbus.testing.conformance.journals.kit import TIME, Suite, make_record, numbers


class QuestionTests(Suite):
    """What is there can be found."""

    # -- questions -------------------------------------------------------------------------------

    async def test_a_message_is_found_by_its_id(self) -> None:
        async with self.opened() as journal:
            record = make_record(1)
            (ack,) = await journal.append([record])

            assert await journal.message(record.message_id) == record._replace(offset=ack.offset)
            assert await journal.message("unknown") is None

    async def test_a_flow_is_a_tree_of_cause_and_effect(self) -> None:
        root = make_record(0)

        def effect(number: int, cause: Record) -> Record:
            return make_record(
                number,
                correlation_id=root.message_id,
                causation_id=cause.message_id,
                root_id=root.message_id,
                depth=cause.depth + 1,
            )

        left, right = effect(1, root), effect(2, root)
        leaf = effect(3, left)
        async with self.opened() as journal:
            await journal.append([root, make_record(9), left, right, leaf])

            (tree,) = await journal.flow(root.message_id)

            assert numbers([tree.record]) == [0]
            assert [numbers([child.record]) for child in tree.children] == [[1], [2]]
            assert numbers(child.record for child in tree.children[0].children) == [3]
            assert await journal.flow("unknown") == ()

    async def test_what_has_lost_its_cause_is_a_root_of_its_own(self) -> None:
        async with self.opened() as journal:
            await journal.append(
                [make_record(n, correlation_id="flow", causation_id=f"lost{n}") for n in range(2)]
            )

            trees = await journal.flow("flow")

            assert numbers(tree.record for tree in trees) == [0, 1]

    async def test_messages_are_found_by_every_field(self) -> None:
        async with self.opened() as journal:
            await journal.append([make_record(n) for n in range(3)])
            await journal.append(
                [
                    make_record(
                        7, topic="t", name="n", key="k", kind=Kind.COMMAND, session_id="s",
                        correlation_id="c", time=5.0,
                    )
                ]
            )  # fmt: skip

            questions: list[dict[str, Any]] = [
                {"topic": "t"}, {"name": "n"}, {"key": "k"}, {"kind": Kind.COMMAND},
                {"session_id": "s"}, {"correlation_id": "c"}, {"until": 6.0},
                {"topic": "t", "since": 5.0, "until": 5.1},
            ]  # fmt: skip
            for question in questions:
                assert numbers(await journal.find(**question)) == [7], question
            assert list(await journal.find(topic="t", name="other")) == []

    async def test_findings_come_page_by_page_in_both_directions(self) -> None:
        async with self.opened() as journal:
            await journal.append([make_record(n, topic=f"t{n % 2}") for n in range(20)])

            async def collect(**options: Any) -> list[int]:
                found: list[int] = []
                page: Page | None = None
                while page is None or (page and page.next):
                    start = 0 if page is None else page.next
                    page = await journal.find(topic="t1", limit=3, start=start, **options)
                    found += numbers(page)
                return found

            assert await collect() == list(range(1, 20, 2))
            assert await collect(newest_first=True) == list(range(19, 0, -2))

    async def test_deliveries_are_kept_in_order(self) -> None:
        first = DeliveryRecord("m", "ship", 1, Outcome.FAILED, 0.5, 0.25, TIME, "ValueError: no", 3)
        second = DeliveryRecord("m", "ship", 2, Outcome.OK, 1.5, 0.125, TIME + 1)
        other = DeliveryRecord("other", "ship", 1, Outcome.REFUSED, 0.0, 0.0, TIME)
        async with self.opened() as journal:
            await journal.commit([op.AddDelivery(one) for one in (first, other, second)])

            assert await journal.deliveries("m") == [first, second]
            assert await journal.deliveries("unknown") == []

"""Makes `report.png`: the report of two hours in a shop with an outage, as a browser shows it.

    python -m docs.images.make_report [--keep report.html]

Needs chromium on PATH, and pillow to make the picture small.
"""

from __future__ import annotations

import argparse
import math
import random
import subprocess
import tempfile
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from PIL import Image

from msgbus.pipeline.report import collect, render
from msgbus.pipeline.session import session
from tests.spark.tables import Row, at, deliveries_frame, delivery, message, messages_frame

HERE: Final = Path(__file__).parent
SECONDS: Final = 7200.0

HANDLERS: Final = {
    "shop.PlaceOrder": {"place_order": 0.004},
    "shop.OrderPlaced": {"reserve_stock": 0.012, "send_receipt": 0.18, "update_search": 0.05},
    "shop.StockReserved": {"charge_card": 0.35},
    "shop.CardCharged": {"ship_order": 0.02, "update_books": 0.003},
    "shop.ParcelSent": {"track_parcel": 0.08},
    "shop.BooksUpdated": {"audit": 0.0012},
}
EFFECTS: Final = {
    "shop.PlaceOrder": ["shop.OrderPlaced"],
    "shop.OrderPlaced": ["shop.StockReserved", "shop.ReceiptSent"],
    "shop.StockReserved": ["shop.CardCharged"],
    "shop.CardCharged": ["shop.ParcelSent", "shop.BooksUpdated"],
}
TIMEOUT: Final = "HandlerTimeoutError: payments.example did not answer within 2.0 s"
ERRORS: Final = {
    "charge_card": TIMEOUT,
    "send_receipt": "SMTPServerDisconnected: connection to 10.0.0.{n} unexpectedly closed",
    "update_search": "IndexError: document {n} is older than 'version {n}'",
    "track_parcel": "ConnectionError: https://parcels.example/track/{n} said 503",
}


@dataclass
class Shop:
    """Two hours of orders; payments hardly answer for a quarter of an hour."""

    dice: random.Random = field(default_factory=lambda: random.Random(5))
    messages: list[Row] = field(default_factory=list)
    deliveries: list[Row] = field(default_factory=list)

    def emit(self, name: str, time: float, cause: Row | None, session_id: str | None) -> None:
        one = message(0, name, time, cause, session_id=session_id)
        one["message_id"] = str(uuid.UUID(int=self.dice.getrandbits(128)))
        if cause is None:
            one.update(root_id=one["message_id"], kind="command")
        self.messages.append(one)
        ends = [self.handle(one, time, *handler) for handler in HANDLERS.get(name, {}).items()]
        if None in ends:
            return
        end = max((time, *(end for end in ends if end is not None)))
        for effect in EFFECTS.get(name, ()):
            self.emit(effect, end + 0.02 * self.dice.random(), one, session_id)

    def handle(self, one: Row, time: float, handler: str, usual: float) -> float | None:
        """When the handler was done; `None` if it never was."""
        dice = self.dice
        is_outage = 3900 < time < 4700
        wait = dice.expovariate(2.5 if is_outage else 100.0)
        if dice.random() < 0.0005:
            return None  # nobody knows where it went
        for attempt in range(1, 5):
            is_down = is_outage and handler == "charge_card"
            run = usual * dice.lognormvariate(0, 0.7) * (5 if is_down else 1)
            if handler not in ERRORS or dice.random() > (0.45 if is_down else 0.015):
                self.record(one, handler, "ok", attempt, wait, run, None)
                return time + wait + run
            outcome = "timed_out" if handler == "charge_card" else "failed"
            text = ERRORS[handler].format(n=dice.randrange(9999))
            self.record(one, handler, outcome, attempt, wait, run, text)
            wait += run + 0.5 * 2**attempt * dice.random()
        self.record(one, handler, "dead_lettered", 4, wait, 0.0, text)
        return None

    def record(
        self,
        one: Row,
        handler: str,
        outcome: str,
        attempt: int,
        wait: float,
        run: float,
        error: str | None,
    ) -> None:
        row = delivery(0, one, handler, outcome, attempt=attempt, wait=wait, run=run, error=error)
        self.deliveries.append(row)

    def open(self, orders: int) -> None:
        for number in range(orders):
            time = SECONDS * self.dice.random()
            if self.dice.random() < 0.35 + 0.3 * math.sin(time / 900):
                time = (time * 0.3 + 2000) % SECONDS
            self.emit("shop.PlaceOrder", time, None, f"checkout-{number:04d}")
        for rows, place in ((self.messages, "offset"), (self.deliveries, "id")):
            rows.sort(key=lambda row: row["time"])
            for number, row in enumerate(rows, 1):
                row[place] = number


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", type=Path, help="keep the page as this file")
    keep = parser.parse_args().keep
    shop = Shop()
    shop.open(1500)
    spark = session()
    data = collect(
        messages_frame(spark, shop.messages),
        deliveries_frame(spark, shop.deliveries),
        source="shop.db",
        now=at(SECONDS + 300),
    )
    with tempfile.TemporaryDirectory() as folder:
        page = keep.absolute() if keep else Path(folder) / "report.html"
        page.write_text(render(data), encoding="utf-8")
        shot = Path(folder) / "shot.png"
        command = ["chromium", "--headless=new", "--no-sandbox", "--hide-scrollbars"]
        command += ["--window-size=1120,1540", f"--screenshot={shot}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)  # noqa: S603
        picture = Image.open(shot).convert("P", palette=Image.Palette.ADAPTIVE, colors=64)
        picture.save(HERE / "report.png", optimize=True)


if __name__ == "__main__":
    main()

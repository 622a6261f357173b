"""`python -m msgbus.routing explain TOPIC --routes FILE`: explain the routes of a topic."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from msgbus.errors import ConfigurationError, InvalidTopicError
from msgbus.messages.topics.pattern import check_topic
from msgbus.messages.topics.router import PatternRouter

DESCRIPTION: Final = """\
Explain which routes match TOPIC, in which order and why.

The file has one route per line: a pattern, an endpoint and an optional priority (default 0).

    # pattern          endpoint   priority
    shop.orders.*      orders
    shop.**            audit      10
    re:shop\\.[a-z]+    letters

Higher priority comes first, then the earlier line. In patterns * matches one segment, **
zero or more; inside a segment * matches any text, ? one character, [a-c] one of these;
re: begins a regular expression for the whole topic. Case is ignored.

Exit code: 0 if a route matches, 1 if none does, 2 on an error."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m msgbus.routing", description="Inspect the routing of topics."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser(
        "explain",
        help="explain which routes match a topic, in which order and why",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explain.add_argument("topic", metavar="TOPIC", help="for example shop.orders.placed")
    explain.add_argument(
        "--routes", required=True, metavar="FILE", help="file of routes; - for standard input"
    )
    explain.add_argument("--json", action="store_true", help="print JSON instead of text")
    explain.add_argument("--case-sensitive", action="store_true", help="distinguish A and a")
    return parser.parse_args(arguments)


def read_routes(lines: Iterable[str], *, case_sensitive: bool) -> PatternRouter:
    """Return a router with the routes of a file.

    Raises:
        ConfigurationError: A line is not valid; the error says which.
    """
    router = PatternRouter(case_sensitive=case_sensitive)
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            pattern, endpoint_id, priority = [*words, "0"] if len(words) == 2 else words
            router.register_route(pattern, endpoint_id, int(priority))
        except InvalidTopicError as error:
            message = f"Line {number}: {error}"
            raise ConfigurationError(message) from None
        except ValueError:
            message = f"Line {number} is not 'PATTERN ENDPOINT [PRIORITY]': {line.strip()}"
            raise ConfigurationError(message) from None
    return router


def main(arguments: Sequence[str] | None = None) -> int:
    """Explain one topic; return the exit code."""
    options = parse(arguments)
    try:
        check_topic(options.topic)
        text = (
            sys.stdin.read() if options.routes == "-" else Path(options.routes).read_text("utf-8")
        )
        router = read_routes(text.splitlines(), case_sensitive=options.case_sensitive)
    except (ConfigurationError, OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    explanation = router.explain(options.topic)
    shown = json.dumps(explanation.as_dict(), indent=2) if options.json else str(explanation)
    sys.stdout.write(f"{shown}\n")
    return 0 if explanation.matches else 1


if __name__ == "__main__":
    sys.exit(main())

"""The campaign on the command line: `python -m tests.campaign --seed 7 --records 300`; exit code 1 for a violation."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from tests.campaign.campaign import Campaign, Report
from tests.campaign.grounds import one_node, three_nodes
from tests.campaign.schedule import LANES, draw, draw_held

_HELD_SHARE = 10  # one in so many records


def main() -> int:
    """Run schedules until there were enough observed faults, and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--records", type=int, default=300, help="of each seed")
    parser.add_argument("--first", type=int, default=0, help="number of the first record")
    parser.add_argument("--faults", type=int, default=0, help="observed faults to go on for, with further seeds")
    parser.add_argument("--lane", action="append", help="only these lanes (the seed then draws others)")
    parser.add_argument("--held", action="store_true", help="only records whose copy is held in the engine")
    parser.add_argument("--nodes", type=int, choices=[1, 3], default=1)
    parser.add_argument("--mongod", help="path of a mongod")
    options = parser.parse_args()
    lanes = [lane for lane in LANES if not options.lane or lane.name in options.lane]
    report = Report()
    seed = options.seed
    open_ground: Any = one_node if options.nodes == 1 else three_nodes
    with open_ground(options.mongod) as (ground, version):
        while True:
            began = time.monotonic()
            found = Report()
            if not options.held:
                found.add(Campaign(draw(seed, options.records, lanes, first=options.first, nodes=options.nodes), ground).run())
            if options.held or (options.faults and options.nodes == 1):
                found.add(Campaign(draw_held(seed, max(1, options.records // _HELD_SHARE)), ground).run())
            report.add(found)
            summary = f"{time.monotonic() - began:.0f} s: {found.table().splitlines()[0]}"
            _say(f"mongod {version}, {options.nodes} node(s), seed {seed}, {summary}")
            for violation in found.violations:
                _say(violation)
            seed += 1
            if sum(report.observed.values()) >= options.faults:
                break
    _say(report.table())
    return 1 if report.violations else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

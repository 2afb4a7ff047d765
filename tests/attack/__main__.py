"""``python -m tests.attack [--only NAME ...]``: every attack against a real server
with an honest client beside it; one table.

Exit status 1 when a promise was broken. What an attack needs and is not there counts as broken.
"""

import argparse
import sys
import time

from kvtier.core.terminal import table
from tests.attack.attacks import ATTACKS
from tests.server_process import short_folder

HEADS = (
    "attack",
    "attacker",
    "what he did",
    "p99 before, under it (ms)",
    "hits lost",
    "MiB before, most",
    "bound",
    "",
)


def cells(attack, felt):
    return [
        attack.name,
        attack.attacker,
        attack.what,
        f"{felt.quiet.p99_ms:.1f}, {felt.under.p99_ms:.1f}",
        f"{felt.under.lost:,} of {felt.under.expected:,}",
        f"{felt.before_mib:.0f}, {felt.most_mib:.0f}",
        bound_text(attack.bound),
        "broken" if felt.beyond(attack.bound) else "kept",
    ]


def bound_text(bound):
    words = (f"{bound.p99_ms:g} ms", f"{bound.lost:g} lost", f"+{bound.grown_mib:g} MiB")
    promised = [text for text in words if "inf" not in text]
    return ", ".join(promised) or "served again within a minute"


def main(words=None, attacks=ATTACKS):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[one.name for one in attacks], metavar="NAME")
    given = parser.parse_args(words)
    told = []
    for attack in attacks:
        if given.only and attack.name not in given.only:
            continue
        begun = time.monotonic()
        with short_folder() as folder:
            told.append((attack, attack.felt(folder)))
        sys.stderr.write(f"{attack.name}: {time.monotonic() - begun:.1f} s\n")
    lines = table(HEADS, [cells(*one) for one in told])
    broken = [f"{one.name}: {text}" for one, felt in told for text in felt.beyond(one.bound)]
    sys.stdout.write("\n".join([*lines, *broken]) + "\n")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())

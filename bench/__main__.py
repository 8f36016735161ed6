"""`python -m bench [NAME...] [--json] [...]`: run benches, or these, one after another.

Without a name all of BENCHES; those of LONG take a quarter of an hour and run when they are
named. Other options go to the bench: `python -m bench soak --turns 600`.
"""

from __future__ import annotations

import subprocess
import sys

from bench import only, parser

BENCHES = ("copy", "fence", "growth", "policy_api", "turn_overhead")
LONG = ("soak",)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("names", nargs="*")
    chosen, rest = options.parse_known_args()
    missed = 0
    for name in only(chosen.names, (*BENCHES, *LONG) if chosen.names else BENCHES):
        # A process each: what one has loaded or warmed does not flatter the next.
        command = [sys.executable, "-m", f"bench.{name}", *(["--json"] if chosen.json else [])]
        command += rest
        missed += subprocess.run(command, check=False).returncode != 0
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

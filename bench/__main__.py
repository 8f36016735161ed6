"""`python -m bench [NAME...] [--json]`: run all benches, or these, one after another."""

from __future__ import annotations

import subprocess
import sys

from bench import only, parser

BENCHES = ("copy", "fence")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("names", nargs="*")
    chosen = options.parse_args()
    missed = 0
    for name in only(chosen.names, BENCHES):
        # A process each: what one has loaded or warmed does not flatter the next.
        command = [sys.executable, "-m", f"bench.{name}", *(["--json"] if chosen.json else [])]
        missed += subprocess.run(command, check=False).returncode != 0
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

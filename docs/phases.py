"""Draw the phases of a move from the tables that the engine runs by.

`python docs/phases.py` rewrites the drawing in architecture.md; a test keeps it in step.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- phases: drawn by docs/phases.py -->\n", "<!-- end of phases -->\n"

sys.path.insert(0, str(ROOT))

from migrations_app.domain.phases import FENCED, NO_RETURN, TABLE, WAY_OUT, Phase  # noqa: E402


def drawing() -> str:
    """Return the tables as a Mermaid state diagram."""
    outs = {edge for ways in WAY_OUT.values() for edge in ways.items()}
    lines = ["```mermaid", "stateDiagram-v2", f"  [*] --> {Phase.PREPARE.name}"]
    for phase in Phase:
        for to in sorted(TABLE[phase], key=list(Phase).index):
            label = " : abort" if (phase, to) in outs else ""
            lines.append(f"  {phase.name} --> {to.name}{label}")
        if not TABLE[phase]:
            lines.append(f"  {phase.name} --> [*]")
    lines += [
        f"  classDef fenced stroke-dasharray: 4\n  class {_names(FENCED)} fenced",
        f"  classDef noreturn stroke-width: 3px\n  class {_names(NO_RETURN)} noreturn",
        "```",
    ]
    return "\n".join(lines) + "\n"


def redrawn(page: str) -> str:
    """Return the page with the drawing of today between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE.name} has lost the marks around the drawing")
    return before + BEGIN + drawing() + END + after


def _names(phases: frozenset[Phase]) -> str:
    return ",".join(phase.name for phase in Phase if phase in phases)


if __name__ == "__main__":
    PAGE.write_text(redrawn(PAGE.read_text()))

"""Accepted and refused answers of each verifier: the tables of docs/verifiers.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "verifiers.md"
SPAN = re.compile(r"(`+)(?P<code>.+?)(?<!`)\1(?!`)|\(empty\)")
"""A text as code, or the empty text."""
REFUSAL = re.compile(rf"(?:{SPAN.pattern}) \((?P<why>[^)]+)\)")


class Case(NamedTuple):
    """A right answer, and the answers that equal it or do not."""

    gold: str
    same: tuple[str, ...]
    other: tuple[str, ...]


def _text(span: re.Match[str]) -> str:
    code = span["code"] or ""
    if code.startswith(" ") and code.endswith(" "):
        code = code[1:-1]  # as Markdown does
    return code.replace("↵", "\n").replace("◌", "")


def _cases(section: str) -> tuple[Case, ...]:
    rows = re.findall(r"^\| (.+) \|$", section, re.MULTILINE)[1:]
    cells = [[tuple(map(_text, SPAN.finditer(cell))) for cell in row.split(" | ")] for row in rows]
    return tuple(Case(gold, same, other) for (gold,), same, other in cells)


_, *_PARTS = re.split(r"^## (.+)\n", PAGE.read_text(), flags=re.MULTILINE)
SECTIONS = dict(zip(_PARTS[::2], _PARTS[1::2], strict=True))
CASES = {name: _cases(section) for name, section in SECTIONS.items()}
"""Verifier → its cases. Every other case's right answer is wrong for a case too, except where a
test of the verifiers says otherwise."""
REFUSED = [
    (name, _text(found), found["why"])
    for name, section in SECTIONS.items()
    for found in REFUSAL.finditer(section.partition("Refused as right answers: ")[2])
]
"""(verifier, right answer that it refuses, part of the message)."""

ANSWERS = tuple(
    re.split(
        r"\s{2,}",
        r"""2  -2  10  100  0  x^2  x+2  2x  2x+1  \sqrt{2}  3\sqrt{2}  5\sqrt{2}  2\sqrt{5}
        \frac{\sqrt{2}}{2}  \frac{\pi}{2}  \frac{3\pi}{2}  2\pi  \pi  \pi^2  \frac{1}{2}
        -\frac{1}{2}  \frac{3}{4}  \frac{4}{3}  1\frac{1}{3}\pi  2\frac{1}{2}  (1,2)  (2,1)  [1,2]
        (1,2]  1,2  1,2,3  \{1,3\}  (-\infty,2)  (2,\infty)  (-\infty,2)\cup(2,\infty)  x=3y  y=3x
        x>2  x<2  x\ge 2  x\in[1,2)  2^{10}x  10^{-2}  e^2  e^{-2}  \log_2 3  \log_3 2  \sin 2
        \cos 2  2i  1+2i  1-2i  \begin{pmatrix}1\\2\end{pmatrix}  \begin{pmatrix}2\\1\end{pmatrix}
        1011_2  12_{10}  \text{(A)}  \text{(B)}  \text{even}  \text{odd}  \text{Monday}  7:30  3:5
        2024  1,234  0.25  33\%  45^\circ  16\text{ cm}^2  17\text{ cm}  f(x)=x^3  |x|  \sqrt[3]{2}
        \sqrt{3}  n!  \binom{9}{4}""",
    )
)
"""Right answers of different value, of the kind of the dataset MATH."""

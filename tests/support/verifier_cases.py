"""What each verifier accepts and refuses. The tests judge these cases, and

    python -m tests.support.verifier_cases > docs/verifiers.md

writes them into the guide.
"""

from __future__ import annotations

from typing import NamedTuple

from swarmnode.tasks.verifiers import VERIFIERS

HEAD = """# Which verifier

A completion is searched for an answer ([`extract`](own-task.md#a-dataset-and-a-verifier)). The
verifier then reads all of the answer found and all of the right answer. Text that it cannot read
completely is wrong as an answer, and refused as a right answer, with the remedy.

These tables are the cases of the verifiers' tests (`python -m tests.support.verifier_cases`).
"""


class Case(NamedTuple):
    """A right answer, and the answers that equal it or do not."""

    gold: str
    same: tuple[str, ...]
    other: tuple[str, ...]


CASES: dict[str, tuple[Case, ...]] = {
    "exact": (
        Case("Paris", (" Paris\n",), ("paris", "", "Paris, France")),
        Case("caf\u00e9", ("cafe\u0301",), ("cafe",)),
        Case("2024-05-17", ("2024-05-17 ",), ("2024-5-17", "17 May 2024")),
    ),
    "numeric": (
        Case(
            "42",
            ("42.0", "42.", "x = 42", "**42**", "４２", "$42$", "\\boxed{42}"),
            ("43", "", "40 or 42", "42, 43", "[42]", "42!", "x^42", "42x", "not 42", "41 = 42"),
        ),
        Case(
            "1234",
            ("1,234", "1 234", "1{,}234", "1\\,234", "1.234e3"),
            ("1.234", "12,34", "1234.5", "1,2,3,4", "12 34"),
        ),
        Case("-3", ("\u22123", "- 3", "-3.0"), ("3", "--3", "5-3", "x-3")),
        Case(
            "0.5",
            (
                ".5",
                "1/2",
                "\\frac{1}{2}",
                "\\frac12",
                "\\dfrac{1}{2}",
                "1/2 = 0.5",
                "½",
                "5e-1",
                "5 \\times 10^{-1}",
            ),
            ("0,5", "2", "0.50001", "1/3", "\\frac{1}{2}\\pi"),
        ),
        Case(
            "2",
            ("2", "4/2"),
            (
                "\\boxed{\\frac{1}{2}}",
                "\\frac{1}{2}",
                "x+2",
                "x^2",
                "2x",
                "2t",
                "2\\pi",
                "2 or 3",
                "1-2",
                "2nd",
                "v2",
                "2:30",
                "2i",
            ),
        ),
        Case(
            "1.5",
            ("1 1/2", "1½", "1\\frac{1}{2}", "\\tfrac{3}{2}", "1.50"),
            ("1/2", "11/2", "1 2", "1.5.0"),
        ),
        Case("1/3", ("0.333333", "0.33333333", "2/6"), ("0.33", "0.334", "0.333343")),
        Case("18.5", ("$18.50", "18.5 dollars", "18.5 USD", "€18.5"), ("1850", "18,5")),
        Case("12%", ("12 %", "12\\%", "12 percent", "12"), ("0.12", "12 km", "12‰")),
        Case(
            "12 km",
            ("12km", "12", "12\\text{ km}", "12 km."),
            ("12 miles", "12 m", "12 kg", "12 km or 13 km"),
        ),
        Case("90", ("90°", "90^\\circ", "90^{\\circ}", "90 degrees"), ("90:00", "90-91")),
        Case(
            "100000",
            ("10^5", "10^{5}", "10⁵", "1e5", "1.0 \\times 10^5", "100,000"),
            ("10^-5", "5", "10", "10^5^1", "105"),
        ),
        Case("3000000", ("3 million", "3,000,000", "$3 million"), ("3", "3 billion", "3M")),
        Case("1000000", ("1e6",), ("1000001", "1000000.1")),
        Case("2^64", ("18446744073709551616",), ("18446744073709551615", "1.8e19")),
        Case("1000000000000001", ("1,000,000,000,000,001",), ("1e15", "1000000000000002")),
        Case("-5", ("-5°", "-5 degrees"), ("5 below zero",)),
        Case("1000000.5", ("1,000,000.5",), ("1000000.6", "1000000.50001")),
        Case("3000001/3", ("1000000.333333",), ("1000000", "1000001")),
        Case("He sold 48 + 24 = 72.\n#### 72", ("72", "48 + 24 = 72"), ("48", "24")),
    ),
    "choice": (
        Case(
            "B",
            ("b", "(B)", "B.", "[b]", "**B**", "\\text{B}", "\\textbf{(B)}"),
            ("A", "A or B", "AB", "A, B", "", "not B", "8"),
        ),
    ),
    "boxed": (
        Case(
            "5\\sqrt{2}",
            ("5\\sqrt2", "5 \\sqrt{2}", "$5\\sqrt{2}$", "5\\sqrt{2}."),
            ("3\\sqrt{2}", "5", "2", "\\sqrt{2}", "5\\sqrt{2}+1"),
        ),
        Case(
            "\\frac{3\\pi}{2}",
            ("\\dfrac{3\\pi}{2}", "\\frac{3 \\pi}{2}"),
            ("\\frac{\\pi}{2}", "\\frac{3}{2}", "2", "3\\pi"),
        ),
        Case("x+2", ("x + 2",), ("2", "x-2", "2+y")),
        Case(
            "2",
            ("2.0", "\\frac{4}{2}", "+2"),
            ("x^2", "x_2", "2x", "2t", "x+2", "1,2", "(1,2)", "\\{2\\}x"),
        ),
        Case(
            "\\frac{1}{2}",
            ("\\frac12", "\\tfrac{1}{2}", "0.5", "1/2", ".5"),
            ("\\frac{1}{3}", "\\frac{2}{1}", "12", "\\frac{-1}{2}", "1", "2"),
        ),
        Case(
            "-\\frac{1}{2}",
            ("\\frac{-1}{2}", "\\frac{1}{-2}", "-0.5", "\u2212\\frac{1}{2}"),
            ("\\frac{1}{2}",),
        ),
        Case("1000", ("1{,}000", "1,000", "1\\,000", "10^3"), ("1", "0", "1.000", "100")),
        Case(
            "(3, 4)",
            ("\\left( 3, 4 \\right)", "(3,4)"),
            ("(4,3)", "[3,4]", "3,4", "(3,4]", "4", "(34)"),
        ),
        Case("[0,1)", ("\\left[0, 1\\right)",), ("(0,1]", "[0,1]", "0,1", "1")),
        Case("x^{2}", ("x^2",), ("x^{12}", "x2", "2", "x^2y")),
        Case("90^\\circ", ("90", "90^{\\circ}", "90°"), ("90\\%", "9", "0")),
        Case(
            "12\\text{ cm}",
            ("12", "12 \\text{ cm}", "12\\mathrm{cm}"),
            ("12\\text{ m}", "12\\text{ cm}^2", "1"),
        ),
        Case("\\text{Evelyn}", ("Evelyn", "\\textbf{Evelyn}"), ("\\text{Carla}", "evelyn", "E")),
    ),
    "math": (
        Case(
            "\\frac{1}{2}",
            ("\\frac12", "0.5", "\\frac{2}{4}", "2^{-1}", "\\frac{1}{6}+\\frac{1}{3}"),
            ("2", "1", "\\frac{1}{3}", "0.05"),
        ),
        Case(
            "\\frac{\\sqrt{2}}{2}",
            ("\\frac{1}{\\sqrt{2}}", "\\sqrt{\\frac12}", "0.5\\sqrt2"),
            ("\\sqrt{2}", "2", "\\frac{\\sqrt{3}}{2}", "0.7071"),
        ),
        Case("(x+1)^2", ("x^2+2x+1", "(1+x)(x+1)"), ("x^2+1", "2", "(y+1)^2", "x^2+2x", "(X+1)^2")),
        Case("2x+3", ("y = 2x+3", "3+2x", "2 x + 3"), ("2", "2x", "2x+3y", "3")),
        Case(
            "\\{1,2\\}",
            ("\\{2,1\\}", "2, 1", "1 \\text{ and } 2"),
            ("(1,2)", "1", "12", "\\{1,2,3\\}"),
        ),
        Case("(1,2)", ("\\left(1, 2\\right)",), ("(2,1)", "[1,2]", "1,2", "2")),
        Case("[0,1)", ("\\left[0,1\\right)",), ("(0,1]", "[0,1]")),
        Case(
            "x=5",
            ("5", "x = 5", "5=x"),
            ("y=5", "x=6", "x>5", "x=5,6", "x\\approx 5", "x==5", "x\\equiv 5"),
        ),
        Case(
            "5", ("x=5", "2+3=5", "5=5"), ("4=5", "4==5", "x\\approx 5", "5=4", "\\{1\\}=\\{2\\}")
        ),
        Case("E", ("E",), ("e", "2E")),
        Case("\\pm 3", ("3,-3", "\\{-3, 3\\}"), ("3", "-3", "\\pm 4")),
        Case("x \\le 3", ("3 \\ge x", "x \\leq 3"), ("x < 3", "x \\ge 3", "3")),
        Case(
            "3\\pi\\text{ cm}", ("3\\pi", "\\pi \\cdot 3"), ("3\\pi\\text{ m}", "3", "9.42", "3p")
        ),
        Case(
            "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
            ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}",),
            ("\\begin{pmatrix}2\\\\1\\end{pmatrix}", "1,2", "(1,2)"),
        ),
        Case("2i", ("(1+i)^2", "-2i^3"), ("-2i", "2j", "2")),
        Case("-1", ("i^2", "e^{i\\pi}"), ("i", "1")),
        Case("f'(x)", ("f'(x)",), ("f(x)", "f''(x)")),
        Case("A^T", ("A^{T}",), ("A",)),
        Case("1000\\pi", ("1{,}000\\pi", "1,\\!000 \\pi"), ("1\\pi", "1,0\\pi")),
        Case("\\text{no}", ("no",), ("on", "\\text{on}")),
        Case("\\text{Friday}", ("Friday",), ("\\text{Monday}", "Fridya", "\\text{yadirF}")),
        Case("1011_2", ("1011_{2}",), ("1011", "11", "1011_3")),
        Case("2024-05-17", ("2024-05-17",), ("2002", "-17", "2024")),
        Case("0.0000001", ("10^{-7}", "1e-7"), ("0.0000002", "0")),
        Case(
            "0.12345678901234567x",
            ("x \\cdot 0.12345678901234567",),
            ("0.12345678901234568x", "0.12345678901234567"),
        ),
        Case("\\sqrt{2}\\cdot 10^{-20}", ("10^{-20}\\sqrt2",), ("\\sqrt{2}\\cdot 10^{-21}", "0")),
    ),
    "json": (
        Case(
            '{"a": [1, 2.0], "b": null}',
            (
                '{"b": null, "a": [1.0, 2]}',
                '```json\n{"a": [1, 2], "b": null}\n```',
                '```\n{"a": [1, 2], "b": null}```',
            ),
            (
                '{"a": [2, 1], "b": null}',
                '{"a": [1, 2]}',
                "{",
                "",
                '{"a": [1, 2], "b": null, "b": null}',
                '{"a": [1, 2], "b": null} Done.',
                '```json\n{"a": [1, 2], "b": null}\n``` Done.',
            ),
        ),
        Case("1", ("1.0", "1e0"), ("true", '"1"', "NaN", "1.0000000000000000001")),
        Case('"caf\u00e9"', ('"cafe\u0301"', '"caf\\u00e9"', '"cafe\\u0301"'), ('"cafe"',)),
    ),
}
"""Verifier → its cases. Every other case's right answer is wrong for a case too, except where a
test of the verifiers says otherwise."""

REFUSED: tuple[tuple[str, str, str], ...] = (
    ("numeric", "3,14", "decimal comma"),
    ("numeric", "0,5", "decimal comma"),
    ("numeric", "€3,14", "decimal comma"),
    ("numeric", "10 000,5", "decimal comma"),
    ("numeric", "1.000,50", "decimal comma"),
    ("numeric", "2024-05-17", "a date"),
    ("numeric", "17.05.2024", "a date"),
    ("numeric", "12:30", "a time"),
    ("numeric", "5 pm", "not one number"),
    ("numeric", "1.2.3", "a version"),
    ("numeric", "5-7", "a range"),
    ("numeric", "5 to 7", "a range"),
    ("numeric", "(1, 2)", "not one number"),
    ("numeric", "[0, 1)", "not one number"),
    ("numeric", "2\\pi", "not one number"),
    ("numeric", "x+2", "not one number"),
    ("numeric", "seven", "no number"),
    ("numeric", "5!", "not one number"),
    ("numeric", "10^99999", "not one number"),
    ("numeric", "1e9999", "out of range"),
    ("numeric", "1/0", "divides by zero"),
    ("choice", "A or B", "one letter"),
    ("boxed", "We add and get \\boxed{x+2}.", "give the final answer alone"),
    ("math", "We add and get \\boxed{x+2}.", "give the final answer alone"),
    ("choice", "Paris", "one letter"),
    ("json", "{", "Expecting"),
    ("json", "NaN", "not JSON"),
    ("math", "x" * 500, "characters"),
)
"""(verifier, right answer that it refuses, part of the message)."""

ANSWERS = (
    "2",
    "-2",
    "10",
    "100",
    "0",
    "x^2",
    "x+2",
    "2x",
    "2x+1",
    "\\sqrt{2}",
    "3\\sqrt{2}",
    "5\\sqrt{2}",
    "2\\sqrt{5}",
    "\\frac{\\sqrt{2}}{2}",
    "\\frac{\\pi}{2}",
    "\\frac{3\\pi}{2}",
    "2\\pi",
    "\\pi",
    "\\pi^2",
    "\\frac{1}{2}",
    "-\\frac{1}{2}",
    "\\frac{3}{4}",
    "\\frac{4}{3}",
    "1\\frac{1}{3}\\pi",
    "2\\frac{1}{2}",
    "(1,2)",
    "(2,1)",
    "[1,2]",
    "(1,2]",
    "1,2",
    "1,2,3",
    "\\{1,3\\}",
    "(-\\infty,2)",
    "(2,\\infty)",
    "(-\\infty,2)\\cup(2,\\infty)",
    "x=3y",
    "y=3x",
    "x>2",
    "x<2",
    "x\\ge 2",
    "x\\in[1,2)",
    "2^{10}x",
    "10^{-2}",
    "e^2",
    "e^{-2}",
    "\\log_2 3",
    "\\log_3 2",
    "\\sin 2",
    "\\cos 2",
    "2i",
    "1+2i",
    "1-2i",
    "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
    "\\begin{pmatrix}2\\\\1\\end{pmatrix}",
    "1011_2",
    "12_{10}",
    "\\text{(A)}",
    "\\text{(B)}",
    "\\text{even}",
    "\\text{odd}",
    "\\text{Monday}",
    "7:30",
    "3:5",
    "2024",
    "1,234",
    "0.25",
    "33\\%",
    "45^\\circ",
    "16\\text{ cm}^2",
    "17\\text{ cm}",
    "f(x)=x^3",
    "|x|",
    "\\sqrt[3]{2}",
    "\\sqrt{3}",
    "n!",
    "\\binom{9}{4}",
)
"""Right answers of different value, of the kind of the dataset MATH."""


def main() -> None:
    print(HEAD)
    for name, cases in CASES.items():
        print(f"## {name}\n")
        print(f"{VERIFIERS[name].guide}\n")
        print("| right answer | equal | not equal |\n|---|---|---|")
        for case in cases:
            print(f"| {_code(case.gold)} | {_codes(case.same)} | {_codes(case.other)} |")
        print()
        refused = [(gold, why) for verifier, gold, why in REFUSED if verifier == name]
        if refused:
            print("Refused as right answers:", ", ".join(f"{_code(g)} ({w})" for g, w in refused))
            print()


def _codes(texts: tuple[str, ...]) -> str:
    return ", ".join(map(_code, texts))


def _code(text: str) -> str:
    """Return a text as code in a cell of a table."""
    if not text:
        return "(empty)"
    text = text if len(text) < 120 else text[:20] + "…"
    for character, name in (("\n", "↵"), ("|", "\\|"), ("\u0301", "◌́")):
        text = text.replace(character, name)
    tick = "``" if "`" in text else "`"
    return f"{tick} {text} {tick}" if tick == "``" or text != text.strip() else f"`{text}`"


if __name__ == "__main__":
    main()

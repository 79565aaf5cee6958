"""Equality of formulas by math-verify, for the verifier `math`. Only the scorer child loads it.

math-verify's parser and comparison are used, not its search for an answer: its regular expressions
backtrack, and its search for plain expressions calls sympy's `parse_expr`, which evaluates text.
A subclass of the parser makes numbers and divisors without `parse_expr` too, and decimals exact. So
no text is ever compiled, and the sandbox needs no exception.

`load` imports everything before the sandbox closes. Each comparison has a limit of CPU time,
because wall-clock limits make honest nodes disagree. The libraries' versions are part of the task's
version.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import pkgutil
import re
from collections.abc import Callable
from typing import Any

from swarmnode.tasks import sandbox

LIBRARIES = ("math-verify", "latex2sympy2-extended", "antlr4-python3-runtime", "sympy")
"""Distributions that decide a verdict. pyproject.toml pins their versions (extra `math`)."""
CPU_SECONDS = 0.5
"""CPU time of one comparison. An ordinary one takes a fiftieth of it."""
VARIABLES = 12
"""Maximum number of variables, and of functions that count as such, in a polynomial."""
_PACKAGES = (
    "assumptions calculus concrete core discrete functions integrals logic matrices ntheory polys"
    " sets series simplify solvers tensor"
)
"""Packages of sympy that its functions import at their first use."""
_WARM = (
    ("\\frac{1}{2}+\\frac{1}{3}", "\\frac{5}{6}"),
    ("(x+1)^2", "x^2+2x+1"),
    ("\\sqrt{8}", "2\\sqrt{2}"),
    ("[0,1)", "[0,2)"),
    ("\\{1,2\\}", "\\{2,3\\}"),
    ("x=5", "x<5"),
    ("\\sin x", "\\cos x"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\3\\end{pmatrix}"),
)


@functools.cache
def load() -> Callable[[str, str], bool]:
    """Import the libraries and return the comparison. Raises ImportError."""
    os.environ.update(SYMPY_GROUND_TYPES="python", MPMATH_NOGMPY="1")  # the same on every node
    import sympy
    from latex2sympy2_extended import latex2sympy2, math_normalization
    from math_verify import grader

    for name in _PACKAGES.split():
        package = importlib.import_module(f"sympy.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not re.search(r"\.(tests|benchmarks|compatibility|trace)\b", module.name):
                importlib.import_module(module.name)
    _build_monomials()
    for library in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(library).setLevel(logging.CRITICAL + 1)  # it logs each parse error
    normal = math_normalization.NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
    )
    names = latex2sympy2.ConversionConfig(lowercase_symbols=False)

    imaginary = sympy.Symbol("i", real=True)

    class Parser(latex2sympy2._Latex2Sympy):  # type: ignore[misc]
        def parse_number(self, text: str) -> Any:  # noqa: ANN401
            return sympy.Rational(text.replace(",", ""))

        def handle_gcd_lcm(self, f: str, args: list[Any]) -> Any:  # noqa: ANN401
            # The library's `nsimplify` parses text that it writes itself.
            return sympy.UnevaluatedExpr(getattr(sympy, f)(args))

    @functools.lru_cache(maxsize=256)
    def parse(text: str) -> Any:  # noqa: ANN401
        text = math_normalization.normalize_latex(text, normal)
        parsed = Parser(None, is_real=True, config=names).parse(text)
        if imaginary in getattr(parsed, "free_symbols", ()):
            return parsed.xreplace({imaginary: sympy.I})  # the library reads i as a variable
        return parsed

    def is_false(parsed: Any) -> bool:  # noqa: ANN401
        """Return True for an equation of two different numbers."""
        if not isinstance(parsed, sympy.Eq) or parsed.free_symbols:
            return False
        return abs(sympy.N(parsed.lhs - parsed.rhs, 50)) > 1e-12

    def compare(answer: str, gold: str) -> bool:
        try:
            given, wanted = parse(answer), parse(gold)
            if is_false(given) and not is_false(wanted):
                return False  # of 1=2 the library would compare the 2
        except Exception:  # the library raises this class for text that is no formula  # noqa: BLE001
            return False
        return bool(
            grader.verify(
                wanted,
                given,
                float_rounding=12,
                numeric_precision=50,
                timeout_seconds=None,
                raise_on_error=True,
            )
        )

    for answer, gold in _WARM:
        compare(answer, gold)
    return compare


def _build_monomials() -> None:
    """Build sympy's functions on monomials of up to `VARIABLES` variables. sympy compiles them from
    source that it writes at the first use, which the sandbox refuses.
    """
    from sympy.polys.monomials import MonomialOps

    build, built = MonomialOps._build, dict[str, Any]()
    MonomialOps._build = lambda self, code, name: built.setdefault(code, build(self, code, name))
    for variables in range(1, VARIABLES + 1):
        for method in ("mul", "pow", "mulpow", "ldiv", "div", "lcm", "gcd"):
            getattr(MonomialOps(variables), method)()

    def find(self: object, code: str, name: str) -> Any:  # noqa: ANN401
        if code not in built:
            raise ValueError(f"more than {VARIABLES} variables")
        return built[code]

    MonomialOps._build = find


def equal(answer: str, gold: str) -> bool:
    """Return True if two formulas (`verifiers.read_formula`) are equal.

    Raises:
        RuntimeError: The comparison takes too much CPU time.
        Exception: Any error of the library.
    """
    compare = load()
    with sandbox.limit_cpu(CPU_SECONDS):
        return compare(answer, gold)

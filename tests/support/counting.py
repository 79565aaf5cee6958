"""Counts over source text, for the rules of the house that are numbers. Each takes paths and
returns what it found, for people to read."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

DIALECT = re.compile(r"(?:Of|That|Whoever)\b")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def trees(paths: Iterable[Path]) -> Iterator[tuple[Path, ast.Module]]:
    for path in paths:
        yield path, ast.parse(path.read_text())


def lines_naming(name: str, paths: Iterable[Path]) -> list[str]:
    """Lines of code, comments and strings aside, with this name; imports of it are not counted."""
    found = []
    for path in paths:
        lines = path.read_text().splitlines()
        tokens = tokenize.generate_tokens(io.StringIO("\n".join(lines)).readline)
        numbers = sorted(
            {
                token.start[0]
                for token in tokens
                if token.type == tokenize.NAME and token.string == name
            }
        )
        found += [
            f"{path}:{number}"
            for number in numbers
            if not re.match(r"\s*(?:from|import)\b", lines[number - 1])
        ]
    return found


def broad_handlers(paths: Iterable[Path]) -> list[str]:
    """`except Exception` and bare `except`; `except BaseException` unless what it caught goes
    on."""
    found = []
    for path, tree in trees(paths):
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                names = {
                    ast.unparse(one).split(".")[-1] if one is not None else "" for one in caught
                }
                goes_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
                if names & {"Exception", ""} or ("BaseException" in names and not goes_on):
                    found.append(f"{path}:{node.lineno}")
    return found


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Of modules, classes, functions and attributes: every statement that is a string."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement.lineno, statement.value.value


def dialect(paths: Iterable[Path]) -> list[str]:
    """Docstrings that begin with no subject."""
    texts = [
        (path, line, text.strip()) for path, tree in trees(paths) for line, text in docstrings(tree)
    ]
    return [f"{path}:{line}: {text[:40]}" for path, line, text in texts if DIALECT.match(text)]


def functions(tree: ast.Module) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def parameters(function: Function) -> list[ast.arg]:
    """All but self and cls; * and ** are not counted."""
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [one for one in every if one.arg not in ("self", "cls")]


def is_command(function: Function) -> bool:
    """A command of the command line: its parameters are its options."""
    return any(
        ".command" in ast.unparse(decorator) or ".default" in ast.unparse(decorator)
        for decorator in function.decorator_list
    )


def many_parameters(paths: Iterable[Path], most: int) -> dict[str, int]:
    found = {}
    for path, tree in trees(paths):
        for owner, function in _named_functions(tree):
            number = len(parameters(function))
            if number > most and not is_command(function):
                found[f"{path}:{owner}"] = number
    return found


def _named_functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    methods = {
        id(part): f"{node.name}."
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for part in node.body
    }
    for function in functions(tree):
        yield f"{methods.get(id(function), '')}{function.name}", function


def taking(type_name: str, paths: Iterable[Path]) -> list[str]:
    """Functions with a parameter of exactly this type, or it and None."""
    found = []
    for path, tree in trees(paths):
        for owner, function in _named_functions(tree):
            for one in parameters(function):
                alternatives = (
                    ast.unparse(one.annotation).strip("'\"").split(" | ")
                    if one.annotation is not None
                    else []
                )
                if type_name in alternatives:
                    found.append(f"{path}:{owner}")
    return found


def many_attributes(paths: Iterable[Path], most: int) -> dict[str, int]:
    """Classes that set more attributes of `self` than `most`, or whose instances do with what their
    bases of the same paths set."""
    own: dict[str, set[str]] = {}
    where: dict[str, str] = {}
    bases: dict[str, list[str]] = {}
    for path, tree in trees(paths):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                name = node.name if node.name not in own else f"{path}:{node.name}"
                where[name] = f"{path}:{node.name}"
                bases[name] = [ast.unparse(base).split(".")[-1] for base in node.bases]
                own[name] = {
                    part.attr
                    for part in ast.walk(node)
                    if isinstance(part, ast.Attribute)
                    and isinstance(part.ctx, ast.Store)
                    and isinstance(part.value, ast.Name)
                    and part.value.id == "self"
                }

    def all_of(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        if name in seen:
            return set()
        return own.get(name, set()).union(
            *(all_of(base, seen | {name}) for base in bases.get(name, ()))
        )

    counted = {where[name]: len(all_of(name)) for name in own}
    return {name: number for name, number in counted.items() if number > most}


def private_reaches(paths: Iterable[Path]) -> list[str]:
    """Where somebody else's private name is used: `other._name`, `from x import _name`,
    `setattr(other, "_name", ...)`."""
    found = []
    for path, tree in trees(paths):
        for node in sorted(ast.walk(tree), key=lambda one: getattr(one, "lineno", 0)):
            names: list[str] = []
            if isinstance(node, ast.Attribute) and not (
                isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            ):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
                "setattr",
                "getattr",
                "delattr",
                "object",
            ):
                names = [
                    one.value
                    for one in node.args[1:2]
                    if isinstance(one, ast.Constant) and isinstance(one.value, str)
                ]
            found += [
                f"{path}:{node.lineno}: {name}" for name in names if re.match(r"_(?!_)", name)
            ]
    return found

"""Find the writers and readers of each field of the product's structs and dataclasses, by mypy's
types. Equal names of different classes are kept apart.

    product = analyse(texts_of(ROOT / "swarmnode"))
    product.structs["swarmnode.wire.messages.Announce"].fields
    # places: ["swarmnode.rollouts.exchange:120", ...]
    product.written["swarmnode.wire.messages.Announce", "size"]

A *writer* passes a field to the constructor or to `replace`, assigns it, or mutates its value. A
*reader* takes its value outside a dunder method of the class itself. A place where mypy infers Any
is no reader; such places are listed in `lost`.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from mypy import nodes as n
from mypy import types as t
from mypy.build import build
from mypy.modulefinder import BuildSource
from mypy.options import Options

REPLACE = {"msgspec.structs.replace", "dataclasses.replace", "copy.replace"}
FILLING = {"append", "add", "extend", "update", "setdefault", "insert", "appendleft", "subtract"}
FOLLOWED = ("msgspec", "msgspec.*")
"""The only libraries whose types are analysed. Of the others only names are needed, and torch would
take a minute."""
APART = 100_000
"""First line number of product modules, beyond any line of typeshed. mypy keeps the types of all
modules in one table keyed by line."""

Field = tuple[str, str]
"""Full name of the declaring class, name of the field."""
Places = dict[str, list[str]]


@dataclasses.dataclass(frozen=True)
class Declared:
    """A struct or dataclass."""

    name: str
    module: str
    fields: tuple[str, ...]
    """In the constructor's order, inherited fields first."""
    optional: frozenset[str]
    """Fields with a default."""
    keywords: frozenset[str]
    """Keywords of the class statement and its bases: `frozen`, `tag`, ..."""
    parts: Mapping[str, frozenset[str]]
    """Field → full names of the classes in its type."""
    methods: frozenset[str]
    is_struct: bool


@dataclasses.dataclass(repr=False)
class Product:
    structs: dict[str, Declared]
    unions: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Alias, or function that takes or returns two or more declared classes → the full names of the
    classes."""
    written: dict[Field, list[str]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    read: dict[Field, list[str]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    lost: Places = dataclasses.field(default_factory=lambda: defaultdict(list))
    """Attribute → places where it is read from a value of unknown type."""
    made: Places = dataclasses.field(default_factory=lambda: defaultdict(list))
    """Class → places where it, or a derived class, is constructed."""
    told_apart: Places = dataclasses.field(default_factory=lambda: defaultdict(list))
    """Class → places where a value is narrowed to it: isinstance, `case`, a table by class, the
    remaining branch."""


def texts_of(package: Path) -> dict[str, str]:
    """Return module → source for a package on disk."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def analyse(texts: Mapping[str, str], without: tuple[str, ...] = ()) -> Product:
    """Analyse the modules. without: modules, and those below them, whose own reads and writes do
    not count."""
    begins, line = {}, APART
    for module, text in texts.items():
        begins[module] = line
        line += text.count("\n") + 2
    result = build(
        [
            BuildSource(f"{module}.py", module, "\n" * begins[module] + text)
            for module, text in texts.items()
        ],
        _options(),
    )
    types: dict[_Position, list[tuple[n.Expression, t.Type]]] = defaultdict(list)
    for expression, type_ in result.types.items():
        if (
            expression.line > APART
            and expression.end_line is not None
            and expression.end_column is not None
        ):
            types[
                expression.line, expression.column, expression.end_line, expression.end_column
            ].append((expression, type_))
    trees = {module: result.files[module] for module in texts}
    product = Product(
        {
            info.fullname: declared
            for tree in trees.values()
            for info in _classes(tree)
            if (declared := _declared(info))
        }
    )
    for tree in trees.values():
        product.unions |= dict(_unions(tree, product.structs))
    for module, text in texts.items():
        if not any(module == other or module.startswith(f"{other}.") for other in without):
            _Uses(trees[module], begins[module], types, product).visit(ast.parse(text))
    return product


_Position = tuple[int, int, int, int]


def _options() -> Options:
    options = Options()
    options.export_types = options.preserve_asts = True
    options.incremental = False
    options.ignore_missing_imports = options.check_untyped_defs = True
    options.follow_imports = "skip"
    options.python_version = (3, 11)
    for pattern in FOLLOWED:
        options.per_module_options[pattern] = {"follow_imports": "silent"}
    return options


def _classes(tree: n.MypyFile | n.TypeInfo) -> Iterator[n.TypeInfo]:
    for symbol in tree.names.values():
        node = symbol.node
        if isinstance(node, n.TypeInfo) and node.fullname == f"{tree.fullname}.{node.name}":
            yield node
            yield from _classes(node)


def _declared(info: n.TypeInfo) -> Declared | None:
    is_struct = any(base.fullname == "msgspec.Struct" for base in info.mro)
    if not is_struct and not any("dataclass" in base.metadata for base in info.mro):
        return None
    fields: dict[str, bool] = {}
    parts: dict[str, frozenset[str]] = {}
    for base in reversed(info.mro[: -1 - is_struct]):
        for statement in base.defn.defs.body:
            if not isinstance(statement, n.AssignmentStmt) or statement.unanalyzed_type is None:
                continue
            target = statement.lvalues[0]
            if (
                isinstance(target, n.NameExpr)
                and isinstance(target.node, n.Var)
                and not target.node.is_classvar
            ):
                fields[target.name] = not isinstance(statement.rvalue, n.TempNode)
                parts[target.name] = frozenset(
                    item.fullname for item in _instances(target.node.type)
                )
    optional = frozenset(name for name, default in fields.items() if default)
    keywords = frozenset(word for base in info.mro for word in base.defn.keywords)
    methods = frozenset(name for base in info.mro for name in base.names)
    return Declared(
        info.fullname,
        info.module_name,
        tuple(fields),
        optional,
        keywords,
        parts,
        methods,
        is_struct,
    )


def _instances(type_: t.Type | None) -> Iterator[n.TypeInfo]:
    """Yield every class in a type, arguments of generics included."""
    proper = t.get_proper_type(type_) if type_ is not None else None
    if isinstance(proper, t.Instance):
        yield proper.type
        for argument in proper.args:
            yield from _instances(argument)
    elif isinstance(proper, t.UnionType | t.TupleType):
        for item in proper.items:
            yield from _instances(item)


def _unions(
    tree: n.MypyFile, structs: Mapping[str, Declared]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    scopes: list[n.MypyFile | n.TypeInfo] = [tree, *_classes(tree)]
    for scope in scopes:
        for symbol in scope.names.values():
            node = symbol.node.func if isinstance(symbol.node, n.Decorator) else symbol.node
            if (
                isinstance(node, n.TypeAlias | n.FuncDef)
                and node.fullname == f"{scope.fullname}.{node.name}"
            ):
                for number, items in enumerate(
                    _alternatives(node.target if isinstance(node, n.TypeAlias) else node.type)
                ):
                    names = tuple(item.fullname for item in items if item.fullname in structs)
                    if len(names) > 1:
                        yield (
                            f"{node.fullname}#{number}"
                            if isinstance(node, n.FuncDef)
                            else node.fullname,
                            names,
                        )


def _alternatives(type_: t.Type | None) -> Iterator[list[n.TypeInfo]]:
    """Yield the unions in a type, at any depth."""
    proper = t.get_proper_type(type_) if type_ is not None else None
    if isinstance(proper, t.UnionType):
        yield [
            item.type
            for part in proper.items
            if isinstance(item := t.get_proper_type(part), t.Instance)
        ]
    inner: list[t.Type] = []
    if isinstance(proper, t.CallableType):
        inner = [*proper.arg_types, proper.ret_type]
    elif isinstance(proper, t.UnionType | t.TupleType):
        inner = list(proper.items)
    elif isinstance(proper, t.Instance):
        inner = list(proper.args)
    for part in inner:
        yield from _alternatives(part)


def read_by_script(product: Product, root: str, script: str, place: str) -> None:
    """Record the fields that a script reads from `root` as JSON. A script has no types, so a field
    matches by name, below `root` only."""
    below, names = {root}, set(re.findall(r"\.([a-z_]+)\b", script))
    while (
        more := {
            part for one in below for parts in product.structs[one].parts.values() for part in parts
        }
        & set(product.structs) - below
    ):
        below |= more
    for one in below:
        for name in names & set(product.structs[one].fields):
            product.read[one, name].append(place)


class _Uses(ast.NodeVisitor):
    """Walk the source of one module with the types that mypy found at the same places."""

    def __init__(
        self,
        tree: n.MypyFile,
        begin: int,
        types: Mapping[_Position, list[tuple[n.Expression, t.Type]]],
        product: Product,
    ) -> None:
        self.tree = tree
        self.begin = begin
        self.types = types
        self.product = product
        self.within: list[n.TypeInfo] = []
        """Enclosing classes."""
        self.dunder = False
        self.only_written: set[ast.expr] = set()

    # ---- position

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        scope = self.within[-1] if self.within else self.tree
        symbol = scope.names.get(node.name)
        if symbol is not None and isinstance(symbol.node, n.TypeInfo):
            self.within.append(symbol.node)
            self.generic_visit(node)
            self.within.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = self.dunder
        self.dunder = self.dunder or (
            bool(self.within) and node.name.startswith("__") and node.name != "__call__"
        )
        self.generic_visit(node)
        self.dunder = before

    def _place(self, node: ast.AST) -> str:
        return f"{self.tree.fullname}:{getattr(node, 'lineno', 0)}"

    # ---- types from mypy

    def _found(self, node: ast.expr) -> list[tuple[n.Expression, t.Type]]:
        last, column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self.types.get(
            (node.lineno + self.begin, node.col_offset, last + self.begin, column), []
        )

    def _infos(self, node: ast.expr) -> tuple[list[n.TypeInfo], bool]:
        """Return (possible classes of the value, whether mypy lost its type)."""
        found: list[n.TypeInfo] = []
        lost = False
        stack = [type_ for _, type_ in self._found(node)]
        while stack:
            proper = t.get_proper_type(stack.pop())
            if isinstance(proper, t.UnionType):
                stack += proper.items
            elif isinstance(proper, t.TypeVarType):
                stack.append(proper.upper_bound)
            elif isinstance(proper, t.TupleType):
                found.append(proper.partial_fallback.type)
            elif isinstance(proper, t.Instance):
                found.append(proper.type)
            elif isinstance(proper, t.AnyType):
                lost = True
        return found, lost

    def _symbol(self, node: ast.expr) -> n.Node | None:
        """Return the definition of a name: a class, an alias or a function."""
        for expression, _ in self._found(node):
            if isinstance(expression, n.RefExpr) and expression.node is not None:
                return expression.node
        if isinstance(node, ast.Name) and node.id in self.tree.names:
            return self.tree.names[node.id].node
        if isinstance(node, ast.Attribute):
            module = self._symbol(node.value)
            if isinstance(module, n.MypyFile | n.TypeInfo) and node.attr in module.names:
                return module.names[node.attr].node
        return None

    def _owners(self, info: n.TypeInfo, name: str) -> Iterator[str]:
        """Yield the declared classes that own field `name` of an `info`. A protocol stands for
        every class with its members."""
        if info.is_protocol:
            asked = {member for base in info.mro if base.is_protocol for member in base.names}
            for full, declared in self.product.structs.items():
                if name in declared.fields and asked <= {*declared.fields, *declared.methods}:
                    yield full
        for base in info.mro:
            if (
                base.fullname in self.product.structs
                and name in self.product.structs[base.fullname].fields
            ):
                yield base.fullname

    def _note(
        self, where: dict[Field, list[str]], owner: ast.expr, name: str, place: ast.AST
    ) -> None:
        infos, lost = self._infos(owner)
        for info in infos:
            if where is self.product.read and self.dunder and info in self.within[-1].mro:
                continue
            for full in self._owners(info, name):
                where[full, name].append(self._place(place))
        if lost and where is self.product.read:
            self.product.lost[name].append(self._place(place))

    # ---- reading

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node not in self.only_written and isinstance(node.ctx, ast.Load):
            self._note(self.product.read, node.value, node.attr, node)
            infos, lost = self._infos(node.value)
            if len(infos) == 1 and not lost:
                self._told(infos[0], node)
        self.generic_visit(node)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        info = self._symbol(node.cls)
        if isinstance(info, n.TypeInfo):
            self._told(info, node)
            declared = self.product.structs.get(info.fullname)
            for name in [
                *node.kwd_attrs,
                *(declared.fields[: len(node.patterns)] if declared else ()),
            ]:
                for full in self._owners(info, name):
                    self.product.read[full, name].append(self._place(node))
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key in node.keys:
            for info in self._named(key) if key is not None else ():
                self._told(info, node)
        self.generic_visit(node)

    def _told(self, info: n.TypeInfo, place: ast.AST) -> None:
        self.product.told_apart[info.fullname].append(self._place(place))

    def _named(self, node: ast.expr) -> Iterator[n.TypeInfo]:
        """Yield the classes in `A`, `(A, B)`, `A | B` or an alias."""
        if isinstance(node, ast.Tuple):
            for item in node.elts:
                yield from self._named(item)
        elif isinstance(node, ast.BinOp):
            yield from self._named(node.left)
            yield from self._named(node.right)
        elif isinstance(node, ast.Name | ast.Attribute):
            symbol = self._symbol(node)
            if isinstance(symbol, n.TypeInfo):
                yield symbol
            elif isinstance(symbol, n.TypeAlias):
                yield from _instances(symbol.target)

    # ---- writing

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._target(target)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._target(node.target)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._target(node.target)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self._target(target)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr in FILLING
        ):
            self._target(call.func.value)
        self.generic_visit(node)

    def _target(self, target: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for item in target.elts:
                self._target(item)
        elif isinstance(target, ast.Starred | ast.Subscript):
            self._target(target.value)
        elif isinstance(target, ast.Attribute):
            self._note(self.product.written, target.value, target.attr, target)
            self.only_written.add(target)

    def visit_Call(self, node: ast.Call) -> None:
        symbol = self._symbol(node.func)
        full = self._name_of(node.func, symbol)
        info = self._constructed(node.func, symbol)
        if info is not None and info.fullname in self.product.structs:
            self._construction(node, info)
        passes_on = isinstance(symbol, n.FuncDef) and n.ARG_STAR2 in symbol.arg_kinds
        # The result has the type of the argument, and each keyword is a field.
        if node.args and (full in REPLACE or passes_on):
            for keyword in node.keywords:
                for name in [keyword.arg] if keyword.arg is not None else _keys(keyword.value):
                    self._note(self.product.written, node.args[0], name, node)
        if full == "builtins.getattr" and isinstance(node.args[1], ast.Constant):
            self._note(self.product.read, node.args[0], str(node.args[1].value), node)
        if full == "builtins.setattr" and isinstance(node.args[1], ast.Constant):
            self._note(self.product.written, node.args[0], str(node.args[1].value), node)
        if full == "builtins.isinstance":
            for asked in self._named(node.args[1]):
                self._told(asked, node)
        self.generic_visit(node)

    def _name_of(self, function: ast.expr, symbol: n.Node | None) -> str:
        """Return the full name of the called function."""
        for _, type_ in self._found(function):
            proper = t.get_proper_type(type_)
            if isinstance(proper, t.CallableType) and isinstance(proper.definition, n.SymbolNode):
                return proper.definition.fullname
        return symbol.fullname if isinstance(symbol, n.SymbolNode) else ""

    def _constructed(self, function: ast.expr, symbol: n.Node | None) -> n.TypeInfo | None:
        if isinstance(symbol, n.TypeInfo):
            return symbol
        for _, type_ in self._found(function):
            proper = t.get_proper_type(type_)
            if isinstance(proper, t.CallableType) and proper.is_type_obj():
                return proper.type_object()
            if isinstance(proper, t.TypeType):
                item = t.get_proper_type(proper.item)
                item = (
                    t.get_proper_type(item.upper_bound) if isinstance(item, t.TypeVarType) else item
                )
                return item.type if isinstance(item, t.Instance) else None
        return None

    def _construction(self, node: ast.Call, info: n.TypeInfo) -> None:
        declared = self.product.structs[info.fullname]
        for base in info.mro:
            self.product.made[base.fullname].append(self._place(node))
        given: list[str] = []
        for number, argument in enumerate(node.args):
            given += (
                declared.fields[number:]
                if isinstance(argument, ast.Starred)
                else declared.fields[number : number + 1]
            )
        for keyword in node.keywords:
            given += (
                [keyword.arg]
                if keyword.arg is not None
                else _keys(keyword.value) or declared.fields
            )
        for field in given:
            for full in self._owners(info, field):
                self.product.written[full, field].append(self._place(node))


def _keys(mapping: ast.expr) -> list[str]:
    """Return the keys of a dictionary literal. Any other mapping has none."""
    keys = mapping.keys if isinstance(mapping, ast.Dict) else []
    return [str(key.value) for key in keys if isinstance(key, ast.Constant)]

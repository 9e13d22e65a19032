"""Mutants of a module: its source with one operator, constant or call changed."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parents[1] / "src" / "fedsieve"
ONE_WAY = {ast.Pow: ast.Mult, ast.FloorDiv: ast.Div, ast.Mod: ast.FloorDiv}
OPERATORS = [(ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr), (ast.And, ast.Or)]
COMPARISONS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
NAMES = [("min", "max"), ("minimum", "maximum"), ("amin", "amax"), ("argmin", "argmax"), ("clamp_min", "clamp_max"), ("any", "all")]
NAMES += [("sum", "mean"), ("zeros_like", "ones_like"), ("zeros", "ones"), ("cos", "sin"), ("add", "sub"), ("add_", "sub_")]
SWAPS = ONE_WAY | {old: new for pair in OPERATORS + COMPARISONS + NAMES for old, new in (pair, pair[::-1])}
COMMUTATIVE = ("min", "max", "minimum", "maximum")
NOT_MUTATED = ("annotation", "returns", "decorator_list", "bases")
"""Fields of syntax nodes that compute nothing, or whether a compiled form runs."""


class Mutant(NamedTuple):
    """A changed line of a function, and the source of its module with that change."""

    module: str
    function: str
    before: str
    after: str
    source: bytes

    @property
    def key(self) -> tuple[str, ...]:
        """What identifies the change, whatever its line number."""
        return self[:-1]


def variants(node: ast.AST, imported: set[str]) -> Iterator[ast.AST]:
    """Yield nodes to put in the place of a node; `imported` are the names of modules, whose functions are not methods."""
    match node:
        case ast.BinOp(left, op, right) if type(op) in SWAPS:
            yield ast.BinOp(left, SWAPS[type(op)](), right)
        case ast.AugAssign(target, op, value) if type(op) in SWAPS:
            yield ast.AugAssign(target, SWAPS[type(op)](), value)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(SWAPS[type(op)](), values)
        case ast.Compare(left, ops, others):
            for i, op in enumerate(ops):
                yield ast.Compare(left, [*ops[:i], SWAPS[type(op)](), *ops[i + 1 :]], others)
        case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
            yield operand
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(float(value)):
            yield ast.Constant(2 * value or 1.0)
        case ast.IfExp(test, body, orelse) if not isinstance(test, ast.Compare):
            yield ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.If(test) if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            yield ast.UnaryOp(ast.Not(), test)
        case ast.Raise() | ast.Expr(ast.Call()):
            yield ast.Pass()
        case ast.Call(args=args) if not any(isinstance(argument, ast.Starred) for argument in args):
            yield from variants_of_call(node, imported)


def variants_of_call(call: ast.Call, imported: set[str]) -> Iterator[ast.expr]:
    """Yield a call with two arguments swapped, with its opposite function, and without the function."""
    func, args = call.func, call.args
    name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
    if len(args) > 1 and ast.dump(args[0]) != ast.dump(args[1]) and name not in COMMUTATIVE:
        yield ast.Call(func, [args[1], args[0], *args[2:]], call.keywords)
    if name in SWAPS:
        yield ast.Call(ast.Name(SWAPS[name]) if isinstance(func, ast.Name) else ast.Attribute(func.value, SWAPS[name]), args, call.keywords)
    if isinstance(func, ast.Attribute) and ast.unparse(func).split(".")[0] not in imported:
        yield func.value
    elif args and not name[:1].isupper():
        yield args[0]


def walk(node: ast.AST, function: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield all nodes that compute something, each with its function: no assertions, no texts of errors, no `strict=`."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        function = f"{function}.{node.name}".strip(".")
    yield function, node
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Raise):
                yield function, child
            elif isinstance(child, ast.AST) and field not in NOT_MUTATED:
                is_check = isinstance(child, ast.Assert | ast.JoinedStr) or (isinstance(child, ast.keyword) and child.arg == "strict")
                yield from () if is_check else walk(child, function)


def mutants_of(module: str) -> list[Mutant]:
    """Return all mutants of a module."""
    source = (SOURCES / module).read_bytes()
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {alias.asname or alias.name.split(".")[0] for node in imports for alias in node.names}
    found = {}
    for function, node in walk(tree):
        for new in variants(node, imported):
            place = node.test if isinstance(node, ast.If) else node
            first, last = place.lineno - 1, place.end_lineno
            text = ast.unparse(ast.fix_missing_locations(new))
            line = lines[first][: place.col_offset] + (text if isinstance(new, ast.stmt) else f"({text})").encode()
            line += lines[last - 1][place.end_col_offset :]
            before, after = (" ".join(part.decode().split()) for part in (b"".join(lines[first:last]), line))
            mutant = Mutant(module, function, before, after, b"".join([*lines[:first], line, *lines[last:]]))
            found[mutant.key] = mutant
    return list(found.values())

"""The user's statement at which a mod failed: where it is, and what to write there in place of what JAX cannot trace.

Python says which characters of a line an instruction belongs to, so the node of the syntax tree that failed is known,
and the advice has the user's own names in it.
"""

import ast
import builtins
import itertools
import linecache
import os
import types
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from flexjax.errors import INSIDE, is_users, links, shown_file, users_part
from flexjax.trace.translation import Equation

_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_NUMPY = os.path.dirname(os.path.abspath(np.__file__)) + os.sep

# ------------------------------------------------------------------- where

WIDTH = 120  # characters of a line that a message shows


def failed_at(whole: types.TracebackType | None) -> types.TracebackType | None:
    """The link of a traceback with the user's statement: the innermost in no library of Python and not in numpy."""
    found = [link for link in links(whole) if is_users(link.tb_frame)]
    own = [link for link in found if not _is_library(link.tb_frame.f_code.co_filename)]
    return (own or found or [None])[-1]


def up_to(whole: types.TracebackType | None, last: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the frames inside of `last`, such as those of numpy; the whole one for None."""
    kept, inside = None, last is not None
    for link in reversed(list(links(whole))):
        inside = inside and link is not last
        if not inside:
            kept = types.TracebackType(kept, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return kept


def _is_library(file: str) -> bool:
    return (
        file.startswith(_NUMPY) or file.endswith(".pyx") or (file.startswith(_STANDARD) and "site-packages" not in file)
    )


def where(link: types.TracebackType | None) -> str:
    """What a message ends with: "\\nin FUNCTION, FILE:LINE: `SOURCE`"; empty for None."""
    if link is None:
        return ""
    code = link.tb_frame.f_code
    return _where(code, link.tb_lineno, link.tb_frame.f_globals)


def where_made(mod: object) -> str:
    """As `where`, for the line that defines the function; empty for functions without code and those of flexjax."""
    function = getattr(mod, "__wrapped__", mod)
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType) or code.co_filename.startswith(INSIDE):
        return ""
    return _where(code, code.co_firstlineno, function.__globals__)  # type: ignore[attr-defined]


def _where(code: types.CodeType, line: int, scope: dict[str, object]) -> str:
    source = linecache.getline(code.co_filename, line, scope).strip()
    source = source if len(source) <= WIDTH else f"{source[: WIDTH - 3]}..."
    return f"\nin {code.co_name}, {shown_file(code.co_filename)}:{line}" + (f": `{source}`" if source else "")


def traceback_of(eqns: Sequence[Equation]) -> types.TracebackType | None:
    """The user's part of the traceback of the last of `eqns`, which are inside each other, or of the one around.

    JAX keeps the frames from the traced function on.
    """
    for eqn in reversed(eqns):
        info = getattr(eqn, "source_info", None)
        made = None if info is None or info.traceback is None else users_part(info.traceback.as_python_traceback())
        if made is not None:
            return made
    return None


# ------------------------------------------------------------------- what to write

AT_RUN_TIME = "a value that is known only at run time"


def advice(link: types.TracebackType | None, by_bools: bool = False) -> str | None:
    """The predicate of a sentence about the mod: what the statement does, and what to write; None if not known.

    by_bools   whether an array was indexed by bools
    """
    found = None if link is None else _node(link)
    if link is None or found is None:
        return None
    node, parents = found
    parent = parents.get(node)
    if isinstance(node, ast.Attribute):
        call = parent if isinstance(parent, ast.Call) and parent.func is node else None
        return _method(node, call)
    if isinstance(node, ast.Call):
        return _called(node, link.tb_frame)
    if isinstance(node, ast.Subscript):
        return _indexed(node, link.tb_frame, by_bools)
    return _decided(node, parents)


def item(link: types.TracebackType | None) -> str:
    """What the expression that failed indexes or calls, as "`table`"; "an array" where that is not known."""
    node = found[0] if link is not None and (found := _node(link)) else None
    if isinstance(node, ast.Subscript):
        return f"`{ast.unparse(node.value)}`"
    return f"{ast.unparse(node.func)}()" if isinstance(node, ast.Call) else "an array"


def _node(link: types.TracebackType) -> tuple[ast.expr, dict[ast.AST, ast.AST]] | None:
    """(the expression that failed, the parent of each node of its file)."""
    code = link.tb_frame.f_code
    place = next(itertools.islice(code.co_positions(), link.tb_lasti // 2, None))
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename, link.tb_frame.f_globals)))
    except (SyntaxError, ValueError):
        return None
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    at = lambda n: (n.lineno, n.end_lineno, n.col_offset, n.end_col_offset)
    found = [n for n in ast.walk(tree) if isinstance(n, ast.expr) and at(n) == place]
    return (found[-1], parents) if found else None


def _decided(node: ast.expr, parents: dict[ast.AST, ast.AST]) -> str | None:
    """For a condition: of `if`, `while`, `and`, `or`, `not`, `in` or a chain of comparisons."""
    whole, parent = node, parents.get(node)
    while isinstance(parent, ast.BoolOp) or (isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not)):
        whole, parent = parent, parents.get(parent)
    word = _word(node) or _word(whole)
    if isinstance(parent, ast.IfExp) and parent.test is whole:
        todo = f"`jnp.where({written(whole)}, {ast.unparse(parent.body)}, {ast.unparse(parent.orelse)})`"
        return f"{word or 'decides by `if` and `else`'} on {AT_RUN_TIME}; write {todo}."
    if isinstance(parent, ast.If) and parent.test is whole:
        todo = f"`jnp.where({written(whole)}, value_if_true, value_if_false)`"
        return f"{word or 'decides by `if`'} on {AT_RUN_TIME}; write {todo}."
    if isinstance(parent, ast.While) and parent.test is whole:
        return f"{word or 'decides by `while`'} on {AT_RUN_TIME}; write `jax.lax.while_loop(condition, body, start)`."
    if isinstance(parent, ast.Assert) and parent.test is whole:
        return f"asserts something of {AT_RUN_TIME}; leave the assertion out."
    return f"{word} on {AT_RUN_TIME}; write `{written(whole)}`." if word else None


def _word(node: ast.AST) -> str:
    if isinstance(node, ast.BoolOp):
        return "uses `and`" if isinstance(node.op, ast.And) else "uses `or`"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return "uses `not`"
    if (tighter := _binds_tighter(node)) is not None:
        return f"chains comparisons, because `{BITS[type(tighter.op)]}` binds tighter than they do,"
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        return "chains comparisons"
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        return "uses `in`"
    return ""


def written(node: ast.expr) -> str:
    """A condition as JAX can trace it."""
    if isinstance(node, ast.BoolOp):
        parts = [written(v) for v in node.values]
        word = "and" if isinstance(node.op, ast.And) else "or"
        if all(map(_is_bool, node.values)):
            return (" & " if word == "and" else " | ").join(
                f"({p})" if not p.startswith(("~", "jnp.")) else p for p in parts
            )
        return _nested(f"jnp.logical_{word}", parts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = written(node.operand)
        return f"~({inner})" if _is_bool(node.operand) else f"jnp.logical_not({inner})"
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        if _binds_tighter(node):
            return _by_comparisons(sides, node.ops)
        pairs = [_compared(a, op, b) for a, op, b in zip(sides, node.ops, sides[1:], strict=False)]
        return pairs[0] if len(pairs) == 1 else " & ".join(f"({p})" for p in pairs)
    return ast.unparse(node)


BITS = {ast.BitAnd: "&", ast.BitOr: "|"}


def _binds_tighter(node: ast.AST) -> ast.BinOp | None:
    """The first inner operand of a chain that is a & b or a | b: Python reads a <= b & c < d as a <= (b & c) < d."""
    inner = node.comparators[:-1] if isinstance(node, ast.Compare) else []
    return next((x for x in inner if isinstance(x, ast.BinOp) and type(x.op) in BITS), None)


def _by_comparisons(sides: list[ast.expr], ops: list[ast.cmpop]) -> str:
    """A chain of comparisons, taken apart at & and |, as it was meant."""
    left, op, right = sides[0], ops[0], sides[1]
    if isinstance(right, ast.BinOp) and type(right.op) in BITS and len(ops) > 1:
        rest = _by_comparisons([right.right, *sides[2:]], ops[1:])
        return f"({_compared(left, op, right.left)}) {BITS[type(right.op)]} {rest}"
    return f"({written(ast.Compare(left, ops, sides[1:]))})"


def _is_bool(node: ast.expr) -> bool:
    """Whether the value is certainly a bool, so that & | ~ mean and, or, not."""
    if isinstance(node, ast.BoolOp):
        return all(map(_is_bool, node.values))
    return isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def _compared(left: ast.expr, op: ast.cmpop, right: ast.expr) -> str:
    if isinstance(op, ast.In | ast.NotIn):
        values = ast.List(right.elts) if isinstance(right, ast.Set) else right
        array = f"jnp.asarray({ast.unparse(values)})"
        item = ast.unparse(left)
        return f"jnp.any({array} == {item})" if isinstance(op, ast.In) else f"jnp.all({array} != {item})"
    return ast.unparse(ast.Compare(left, [op], [right]))


def _nested(name: str, parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{name}({parts[0]}, {_nested(name, parts[1:])})"


# ------------------------------------------------------------------- functions and methods

METHODS = {
    **dict.fromkeys(("item", "tolist", "numpy", "cpu", "cuda", "contiguous"), "{0}"),
    **dict.fromkeys(("float", "double"), "jnp.float32({0})"),
    "half": "jnp.float16({0})",
    "bfloat16": "jnp.bfloat16({0})",
    **dict.fromkeys(("int", "long"), "jnp.int32({0})"),
    "bool": "jnp.bool({0})",
    "clamp": "jnp.clip({0}, {1})",
    "detach": "jax.lax.stop_gradient({0})",
    "pow": "jnp.power({0}, {1})",
    "sigmoid": "jax.nn.sigmoid({0})",
    "relu": "jax.nn.relu({0})",
    "erf": "jax.scipy.special.erf({0})",
}
"""What to write for methods of torch and numpy; {0} is the object, {1} are the arguments."""

BUILTINS: dict[object, str] = {
    float: "jnp.float32({1})",
    int: "jnp.int32({1})",
    complex: "jnp.complex64({1})",
    bool: "jnp.bool({1})",
}
PAIRS: dict[object, str] = {max: "max", min: "min"}
SEQUENCES: dict[object, str] = {any: "any", all: "all", sorted: "sort", max: "max", min: "min"}
IN_MATH = {
    "pow": "jnp.power",
    "fabs": "jnp.abs",
    "dist": "jnp.linalg.norm",
    **{name: f"jax.scipy.special.{name}" for name in ("erf", "erfc", "gamma", "comb")},
    "lgamma": "jax.scipy.special.gammaln",
}


def _method(node: ast.Attribute, call: ast.Call | None) -> str:
    """For an attribute that JAX scalars do not have; `call` is the call of it as a method."""
    has_not = f"uses .{node.attr} of a scalar, which JAX scalars do not have"
    todo = None if call is None else _instead_of_method(node, call)
    if todo is None:
        return f"{has_not}; use a function of jax.numpy."
    return f"{has_not}; write `{todo}`."


def _instead_of_method(node: ast.Attribute, call: ast.Call) -> str | None:
    self, alone = ast.unparse(node.value), ast.unparse(node).removesuffix(f".{node.attr}")
    arguments = [ast.unparse(a) for a in (*call.args, *call.keywords)]
    if node.attr == "masked_fill" and len(arguments) == 2:
        return f"jnp.where({arguments[0]}, {arguments[1]}, {self})"
    if node.attr == "to" and call.args and isinstance(call.args[0], ast.Constant):
        return alone  # a device: a call runs where its arrays are. `alone` has parentheses where `self` needs them
    if node.attr in ("to", "type"):
        name = arguments[0].rpartition(".")[2] if arguments else ""
        dtype = f"jnp.{name}" if isinstance(getattr(jnp, name or "-", None), type(jnp.float32)) else "dtype"
        return f"{alone}.astype({dtype})"
    form = METHODS.get(node.attr) or (f"jnp.{node.attr}({{0}}, {{1}})" if hasattr(jnp, node.attr) else None)
    return None if form is None else _filled(form, alone if form == "{0}" else self, arguments)


def _filled(form: str, self: str, arguments: list[str]) -> str:
    return form.format(self, ", ".join(arguments)).replace(", )", ")")


def _called(node: ast.Call, frame: types.FrameType) -> str | None:
    """For a call to which Python or numpy hands a traced value."""
    arguments = [ast.unparse(a) for a in (*node.args, *node.keywords)]
    function, name = _value(node.func, frame), ast.unparse(node.func)
    if isinstance(node.func, ast.Attribute) and function is None:
        todo = _instead_of_method(node.func, node)
        name = f".{node.func.attr}"
    else:
        todo = _instead_of_call(function, node, arguments)
    return None if todo is None else f"calls {name}() on {AT_RUN_TIME}; write `{todo}`."


def _instead_of_call(function: object, node: ast.Call, arguments: list[str]) -> str | None:
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__name__", "")
    if not _hashable(function) or node.keywords:
        return None
    if function in PAIRS and len(arguments) > 1:
        return _nested(f"jnp.{PAIRS[function]}imum", arguments)
    if function in SEQUENCES:
        items = node.args[0]
        items = ast.ListComp(items.elt, items.generators) if isinstance(items, ast.GeneratorExp) else items
        return f"jnp.{SEQUENCES[function]}(jnp.stack({ast.unparse(items)}))"
    if function is range:
        return f"jax.lax.fori_loop({', '.join(arguments if len(arguments) > 1 else ['0', *arguments])}, body, value)"
    if function in BUILTINS:
        return _filled(BUILTINS[function], "", arguments)
    if module == "math" and name == "log" and len(arguments) == 2:
        return f"jnp.log({arguments[0]}) / jnp.log({arguments[1]})"
    if module == "math" and name in IN_MATH:
        return _filled(f"{IN_MATH[name]}({{1}})", "", arguments)
    called = node.func.attr if isinstance(node.func, ast.Attribute) else name
    name = called if hasattr(jnp, called) else name  # np.abs is named absolute
    of_numpy = isinstance(function, np.ufunc) or module.partition(".")[0] == "numpy"
    if (of_numpy or module == "math") and hasattr(jnp, name):
        return _filled(f"jnp.{name}({{1}})", "", arguments)
    return None


def _indexed(node: ast.Subscript, frame: types.FrameType, by_bools: bool) -> str | None:
    """For what a traced value indexes and Python or numpy cannot read, for slices, and for what is written to."""
    held, value = ast.unparse(node.value), _value(node.value, frame)
    index = ast.unparse(node.slice)[1:-1] if isinstance(node.slice, ast.Tuple) else ast.unparse(node.slice)
    if not isinstance(node.ctx, ast.Load):
        return f"writes to `{held}`; a mod returns one number and changes nothing: compute the array before the call."
    if any(isinstance(part, ast.Slice) for part in ast.walk(node.slice)):
        todo = "compute before the call what it needs of each slice, for example x = jnp.cumsum(t) for sums of t[:i]"
        return f"slices `{held}` by {AT_RUN_TIME}, so the length is not known; {todo}, and read an element."
    if isinstance(value, list | tuple) or isinstance(node.value, ast.List | ast.Tuple):
        return f"indexes a list by {AT_RUN_TIME}; write `jnp.asarray({held})[{index}]`."
    if isinstance(value, dict | set) or isinstance(node.value, ast.Dict):
        todo = "make an array of the values, values = jnp.asarray([...]), and write"
        return f"looks {AT_RUN_TIME} up in a dict; {todo} `values[{index}]`."
    if by_bools:
        return f"chooses elements by {AT_RUN_TIME}; write `jnp.where({index}, {held}, 0)`."
    kind = "a numpy array" if isinstance(value, np.ndarray) else "a numpy array or a list"
    return f"indexes {kind} by {AT_RUN_TIME}; write `jnp.asarray({held})[{index}]`."


def _hashable(value: object) -> bool:
    return isinstance(value, Callable) and value.__hash__ is not None  # type: ignore[arg-type]


def _value(node: ast.expr, frame: types.FrameType) -> object:
    """What a name, or an attribute of a module that a name has, is where the frame is; None where that is not known."""
    if isinstance(node, ast.Name):
        for scope in (frame.f_locals, frame.f_globals, vars(builtins)):
            if node.id in scope:
                return scope[node.id]
    if isinstance(node, ast.Attribute):
        held = _value(node.value, frame)
        return getattr(held, node.attr, None) if isinstance(held, types.ModuleType) else None
    return None

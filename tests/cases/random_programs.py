"""Random calls of flex_attention whose mods are Python text: reads of captured arrays at computed indices, arithmetic, masks, options.

A call is drawn from a text alone (`draw`), and prints as a program, so that what fails can be read and run again. Arrays are described by
shape and dtype; only their values are missing. Indices of b, h, q and kv are named b, h, i and j.
"""

import dataclasses
import hashlib
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import flexjax

T = typing.TypeVar("T")
Index = tuple[str, int]
"""The text of an index, and a number that it is below."""

LENGTHS = (1, 2, 5, 16, 64, 100, 127, 128, 129, 203, 256, 300, 512, 520, 1000, 1024, 2048)
DIMS = (8, 16, 32, 40, 64, 64, 64, 72, 96, 128, 128, 160, 192, 256, 272)
BLOCKS = (64, 128, 128, 256, (64, 128), (128, 256), (16, 32), 32, (96, 64))
MOST_ELEMENTS = 1 << 28
"""Of a captured array."""

UNARY = (
    "jnp.tanh({})", "jnp.sin({})", "jnp.exp(-jnp.square({}))", "jnp.log1p(jnp.abs({}))", "jnp.sqrt(jnp.abs({}) + 1.0)",
    "jax.nn.sigmoid({})", "jax.nn.softplus({})", "jax.nn.relu({})", "jax.nn.gelu({})", "jnp.square({})", "jax.lax.erf({})",
    "jnp.floor({})", "jnp.abs({})", "jax.lax.stop_gradient({})", "jnp.asarray({}, jnp.bfloat16).astype(jnp.float32)",
    "jnp.asarray({}, jnp.float16).astype(jnp.float32)", "jnp.cbrt({})", "jnp.arctan({})", "jnp.expm1(jnp.minimum({}, 1.0))",
    "jnp.sign({})", "jnp.round({})", "jax.nn.silu({})", "jnp.clip({}, -3.0, 3.0)", "jnp.nan_to_num({})", "({}) ** 3", "0.5 * ({})",
    "-({})", "30.0 * jnp.tanh(({}) / 30.0)", "jax.lax.reduce_precision({}, 8, 7)", "jnp.sinh(jnp.clip({}, -2, 2))",
    "jnp.remainder({}, 2.0)", "jnp.float32(1.5) - {}", "jax.lax.fori_loop(0, 3, lambda n, x: 0.5 * x + n, {})",
)  # fmt: skip
BINARY = (
    "({}) + ({})", "({}) - ({})", "({}) * ({})", "jnp.maximum({}, {})", "jnp.minimum({}, {})", "({}) / (1.0 + jnp.abs({}))",
    "jnp.logaddexp({}, {})", "jnp.arctan2({}, 1.0 + jnp.abs({}))", "jnp.hypot(1.0 + ({}), {})",
    "jnp.power(1.0 + jnp.abs({}), {})", "({}) + 0.1 * ({})", "jnp.stack([{}, {}]).sum()",
)  # fmt: skip
CHOICE = ("jnp.where({}, {}, {})", "jax.lax.cond({}, lambda: {}, lambda: {})", "jax.lax.select({}, {}, {})")
COMPARED = ("<", "<=", ">", ">=", "==", "!=")


@dataclasses.dataclass(frozen=True)
class RandomCall:
    """A call that was drawn.

    query, key, value   shapes, in the layout of the call
    dtype               of the three
    arrays              the captured arrays and other operands by the names that the texts use
    texts               expressions by the names of arguments of flex_attention; blocks: the block size, of a block mask
    wanted              names of the arrays with a gradient, query, key and value among them
    aux                 whether lse is a part of the loss
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: str
    arrays: dict[str, jax.ShapeDtypeStruct]
    texts: dict[str, str]
    wanted: tuple[str, ...]
    aux: bool

    def __str__(self) -> str:
        """The call as a program."""
        lines = [f"{name} = {self.dtype}{list(getattr(self, name))}" for name in ("query", "key", "value")]
        lines += [f"{name} = {a.dtype}{list(a.shape)}" for name, a in self.arrays.items()]
        lines += [f"{name}={text}" for name, text in self.texts.items()]
        return "\n".join([*lines, f"gradients of {', '.join(self.wanted)}" + (", through lse too" if self.aux else "")])

    def operands(self) -> dict[str, jax.ShapeDtypeStruct]:
        """All arrays by name, without values."""
        tokens = {n: jax.ShapeDtypeStruct(getattr(self, n), self.dtype) for n in ("query", "key", "value")}
        return {**tokens, **self.arrays}

    def attend(self, operands: dict[str, jax.Array], **options: typing.Any) -> typing.Any:
        """The results of the call: out, or out and lse; `options` are more arguments of flex_attention."""
        names = {"jax": jax, "jnp": jnp, "flexjax": flexjax, **operands}
        given = {name: eval(text, names) for name, text in self.texts.items()}
        if "blocks" in given:
            sizes = self._sizes()
            mask, block = given.pop("mask_mod"), given.pop("blocks")
            where = {k: given[k] for k in ("origin",) if k in given}
            given["block_mask"] = flexjax.create_block_mask(mask, *sizes, block_size=block, **where)
        aux: typing.Any = flexjax.AuxRequest(lse=True) if self.aux else None
        tokens = (operands[name] for name in ("query", "key", "value"))
        return flexjax.flex_attention(*tokens, return_aux=aux, **given, **options)

    def _sizes(self) -> tuple[int, int, int, int]:
        """(batch, query heads, queries, keys)."""
        heads, tokens = (1, 2) if self.texts.get("layout") == "'BNTH'" else (2, 1)
        return self.query[0], self.query[heads], self.query[tokens], self.key[tokens]

    def loss(self, operands: dict[str, jax.Array], **options: typing.Any) -> jax.Array:
        """A number with a cotangent for out and, where the call asks for it, for lse."""
        found = self.attend(operands, **options)
        out, aux = found if self.aux else (found, None)
        total = (out.astype(jnp.float32) ** 2).sum()
        return total if aux is None else total + jnp.where(jnp.isfinite(aux.lse), aux.lse, 0.0).sum()

    def gradient(self, **options: typing.Any) -> Callable[[dict[str, jax.Array]], dict[str, jax.Array]]:
        """The function from all operands to the gradients of the wanted ones."""

        def run(operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
            rest = {n: x for n, x in operands.items() if n not in self.wanted}
            moved = {n: operands[n] for n in self.wanted}
            return jax.grad(lambda moved: self.loss({**rest, **moved}, **options))(moved)

        return run


def draw(text: str, small: bool = False) -> RandomCall:
    """The call that a text stands for; `small`: of few tokens, to be run and not only lowered."""
    return _Draw(np.random.default_rng(int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)), small).call()


class _Draw:
    """Draws one call."""

    def __init__(self, rng: np.random.Generator, small: bool) -> None:
        self.rng, self.arrays, self.reads = rng, {}, []
        lengths = tuple(n for n in LENGTHS if n <= 150) if small else LENGTHS
        self.batch, self.kv_heads = self.pick((1, 1, 2, 3)), self.pick((1, 1, 2, 3))
        self.heads = self.kv_heads * self.pick((1, 1, 1, 2, 2, 3) if small else (1, 1, 1, 2, 2, 3, 4, 8))
        self.q_len, self.kv_len = self.pick(lengths), self.pick(lengths)
        if self.chance(0.4):
            self.q_len = self.kv_len
        self.dim = self.pick(DIMS[:7] if small else DIMS)
        self.value_dim = self.dim if self.chance(0.7) else self.pick(DIMS[:7] if small else DIMS)

    def pick(self, values: Sequence[T]) -> T:
        return values[int(self.rng.integers(len(values)))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def number(self, low: int, high: int) -> int:
        """An integer from low to high."""
        return int(self.rng.integers(low, max(low, high) + 1))

    def array(self, prefix: str, shape: tuple[int, ...], dtype: str) -> str:
        """The name of a new captured array."""
        name = f"{prefix}{len(self.arrays)}"
        self.arrays[name] = jax.ShapeDtypeStruct(shape, dtype)
        return name

    # ------------------------------------------------------------- indices

    def uniform(self) -> Index:
        """An index of b, h and constants."""
        b, h, m = self.batch, self.heads, self.number(1, 4)
        return self.pick(
            [
                lambda: ("h", h), lambda: ("h", h), lambda: ("b", b), lambda: (str(m), m + 1), lambda: (f"h // {m}", h), lambda: (f"h % {m}", m),
                lambda: (f"b * {h} + h", b * h), lambda: (f"h * {b} + b", b * h), lambda: (f"{h - 1} - h", h),
                lambda: (f"(b + h) % {m}", m), lambda: (f"jnp.minimum(h, {m})", m + 1), lambda: ("jnp.where(h > b, h, 0)", h),
                lambda: (f"{self.array('map', (h,), 'int32')}[h]", m), lambda: (f"{self.array('map', (b, h), 'int32')}[b, h]", m),
                lambda: (f"{self.array('map', (b,), 'int32')}[b]", m), lambda: (f"(h ^ b) & {m}", m + 1),
            ]
        )()  # fmt: skip

    def position(self, axis: str) -> Index:
        """An index of one of i and j, and perhaps of b and h."""
        n, m, b, h = self.q_len if axis == "i" else self.kv_len, self.number(1, 40), self.batch, self.heads
        return self.pick(
            [
                lambda: (axis, n), lambda: (axis, n), lambda: (axis, n), lambda: (f"{axis} + {m}", n + m), lambda: (f"{n - 1} - {axis}", n),
                lambda: (f"{axis} // {m}", (n - 1) // m + 1), lambda: (f"{axis} % {m}", m), lambda: (f"{axis} * 2", 2 * n - 1),
                lambda: (f"{self.array('ids', (n,), 'int32')}[{axis}]", m), lambda: (f"{self.array('ids', (b, n), 'int32')}[b, {axis}]", m),
                lambda: (f"jnp.minimum({axis}, {m})", m + 1), lambda: (f"{axis} + h", n + h - 1),
                lambda: (f"({axis} * 5 + b) % {m}", m), lambda: (f"{axis} + {self.array('offset', (b,), 'int32')}[b]", n + m),
                lambda: (f"{axis} // {m} * {h} + h", ((n - 1) // m + 1) * h), lambda: (f"jnp.clip({axis} - {m}, 0, {m})", m + 1),
            ]
        )()  # fmt: skip

    def pair(self) -> Index:
        """An index of both i and j."""
        t, s, m = self.q_len, self.kv_len, self.number(1, 40)
        return self.pick(
            [
                lambda: (f"i - j + {s - 1}", t + s - 1), lambda: (f"j - i + {t - 1}", t + s - 1), lambda: ("jnp.abs(i - j)", max(t, s)),
                lambda: (f"jnp.clip(i - j, -{m}, {m}) + {m}", 2 * m + 1), lambda: (f"(i * 7 + j * 3) % {m}", m),
                lambda: ("jnp.maximum(i, j)", max(t, s)), lambda: (f"jnp.where(i >= j, i % {m}, j % {m})", m),
                lambda: (f"i // {m} - j // {m} + {(s - 1) // m}", (t - 1) // m + (s - 1) // m + 1),
                lambda: (f"{self.array('ids', (t,), 'int32')}[i] * {m} + {self.array('ids', (s,), 'int32')}[j]", m * m),
                lambda: ("jnp.minimum(jnp.log1p(jnp.abs(i - j).astype(jnp.float32)).astype(jnp.int32), 7)", 8),
                lambda: ("(i ^ j) & 15", 16), lambda: ("(i > j).astype(jnp.int32)", 2), lambda: (f"i - j + {s - 1} + h", t + s + self.heads - 2),
                lambda: ("i + j", t + s - 1), lambda: (f"i % {m} - j % {m} + {m - 1}", 2 * m - 1), lambda: (f"i * {s} + j", t * s),
                lambda: (f"i - j + {s - 1} + {self.array('offset', (self.batch,), 'int32')}[b]", t + s + m),
            ]
        )()  # fmt: skip

    def indices(self) -> list[Index]:
        """The indices of a read, in one of the forms that people write or in a random one."""
        u, q, k, p = self.uniform, lambda: self.position("i"), lambda: self.position("j"), self.pair
        forms = [
            [], [u], [u, u], [q], [k], [u, q], [u, k], [p], [u, p], [p, p], [q, k], [k, q], [u, q, k], [u, q, k], [u, u, q, k],
            [u, p, p], [q, u], [q, u, k], [q, q], [p, u],
        ]  # fmt: skip
        plain = [[("i", self.q_len), ("j", self.kv_len)], [("j", self.kv_len), ("i", self.q_len)]]
        if self.chance(0.3):  # a bias for each pair, its leading indices drawn
            return [u() for _ in range(self.number(0, 3))] + plain[self.chance(0.1)]
        return [one() for one in self.pick(forms)]

    # ------------------------------------------------------------- values

    def read(self) -> str:
        """A read of a captured array: of a new one, or again of one that is there, at other indices."""
        at = self.indices()
        if self.reads and self.chance(0.3):
            name = self.pick(self.reads)
            shape = self.arrays[name].shape
            if len(shape) == len(at):
                at = [(f"({text}) % {n}" if below > n else text, n) for (text, below), n in zip(at, shape, strict=True)]
                return self._read(name, at)
        shape = tuple(below + self.pick((0, 0, 0, 3)) for _, below in at)
        if np.prod(shape, dtype=float) > MOST_ELEMENTS:
            return "0.25"
        if len(at) == 1 and self.chance(0.1):  # a product of two short vectors
            left, right = (self.array("vector", (*shape, 3), "float32") for _ in range(2))
            return f"({left}[{at[0][0]}] * {right}[{at[0][0]}]).sum()"
        dtype = self.pick(("float32", "float32", "float32", "bfloat16", "bfloat16", "float16", "int32", "int8", "bool"))
        name = self.array("bias", shape, dtype)
        self.reads.append(name)
        return self._read(name, at)

    def _read(self, name: str, at: list[Index]) -> str:
        inner = ", ".join(text for text, _ in at)
        if len(at) > 1 and self.chance(0.15):
            text = f"{name}[{at[0][0]}][{', '.join(text for text, _ in at[1:])}]"
        else:
            text = f"{name}[{inner}]" if at else name
        return f"{text}.astype(jnp.float32)"

    def value(self, depth: int) -> str:
        """A float32 expression."""
        if depth == 0 or self.chance(0.15):
            leaves = [self.read, self.read, self.read, lambda: "s", lambda: str(self.number(-8, 8) / 4)]
            places = ["0.1 * (i - j)", "0.01 * j", "(h + 1) / 8", "jnp.abs(i - j).astype(jnp.float32)", "0.1 * (b + i)"]
            return self.pick([*leaves, lambda: f"jnp.asarray({self.pick(places)}, jnp.float32)"])()
        kind = self.rng.random()
        if kind < 0.35:
            return self.pick(UNARY).format(self.value(depth - 1))
        if kind < 0.85:
            return self.pick(BINARY).format(self.value(depth - 1), self.value(depth - 1))
        left, right = (f"jnp.asarray({self.value(depth - 1)}, jnp.float32)" for _ in range(2))
        return self.pick(CHOICE).format(self.condition(True), left, right)

    def score(self) -> str:
        """A score: what models write, with random values, or anything."""
        forms = [
            lambda: f"s + {self.read()}", lambda: f"s + {self.read()}", lambda: f"s * {self.read()} + {self.read()}",
            lambda: f"s + {self.value(2)}", lambda: f"s * {self.value(2)}", lambda: self.value(3),
            lambda: f"20.0 * jnp.tanh((s + {self.value(1)}) / 20.0)", lambda: f"s + {self.read()} + {self.read()} * {self.read()}",
            lambda: f"jnp.where({self.condition(True)}, s + {self.value(1)}, {self.value(1)})",
        ]  # fmt: skip
        return f"lambda s, b, h, i, j: jnp.asarray({self.pick(forms)()}, jnp.float32)"

    # ------------------------------------------------------------- conditions

    def condition(self, score: bool = False, depth: int = 2) -> str:
        """A boolean; `score`: of s and captured floats too."""
        if depth and self.chance(0.3):
            left, right = self.condition(score, depth - 1), self.condition(score, depth - 1)
            return self.pick((f"({left} & {right})", f"({left} | {right})", f"~{left}"))
        b, t, s, m = self.batch, self.q_len, self.kv_len, self.number(1, 200)
        ids = lambda n: self.array("ids", (b, n), "int32")

        def documents() -> str:
            """Whether query and key have the same number in an array of both."""
            name = self.array("ids", (max(t, s),), "int32")
            return f"({name}[i] == {name}[j])"

        choices = [
            lambda: "(i >= j)", lambda: f"(i - j < {m})", lambda: f"(jnp.abs(i - j) <= {m})", documents,
            lambda: f"(j < {self.array('length', (b,), 'int32')}[b])", lambda: f"((i - j) % {m % 7 + 1} == 0)",
            lambda: f"({self.array('flag', (s,), 'bool')}[j])", lambda: f"(i // {m} == j // {m})", lambda: "(h % 2 == 0)",
            lambda: f"({ids(t)}[b, i] {self.pick(COMPARED)} {ids(s)}[b, j])", lambda: f"((i * 3 + j) % {m} < {m // 2 + 1})",
            lambda: f"({self.array('flag', (t, s), 'bool')}[i, j])", lambda: f"(i >= j + h * {m % 9})", lambda: "((i + j + b) % 3 > 0)",
            lambda: f"({self.array('flag', (self.heads, s // 16 + 1), 'bool')}[h, j // 16])",
            lambda: f"({self.pair()[0]} {self.pick(COMPARED)} {self.position('j')[0]})",
        ]  # fmt: skip
        if score:
            choices += [lambda: "(s > 0.0)", lambda: f"({self.read()} > 0.0)"]
        return self.pick(choices)()

    # ------------------------------------------------------------- the call

    def origin(self) -> str:
        """An Origin of numbers, of a traced scalar, or of a number for each batch entry."""
        starts = [lambda: str(self.number(0, 300))] + [
            lambda s=s: self.array("start", s, "int32") for s in ((), (self.batch,))
        ]
        offset = lambda: self.pick(starts)()
        whole = self.pick(("", f", whole=({self.batch}, {self.heads}, {self.q_len + 300}, {self.kv_len + 300})"))
        forms = [
            lambda: "query='end'", lambda: f"query={offset()}{whole}", lambda: f"key={offset()}",
            lambda: f"batch=1, head=2, query={offset()}, key={offset()}",
        ]  # fmt: skip
        return f"flexjax.Origin({self.pick(forms)()})"

    def call(self) -> RandomCall:
        """The call, with every option that it may have."""
        b, n, m, t, s = self.batch, self.heads, self.kv_heads, self.q_len, self.kv_len
        texts = {} if self.chance(0.05) else {"score_mod": self.score()}
        if self.chance(0.6):
            texts["mask_mod"] = f"lambda b, h, i, j: jnp.asarray({self.condition()})"
        lengths = self.chance(0.2)
        if lengths and self.chance(0.5):
            texts["query_seq_lengths"] = self.array("length", (b,), "int32")
        if lengths:
            texts["key_value_seq_lengths"] = self.array("length", (b,), "int32")
        if self.chance(0.2):
            texts["origin"] = self.origin()
        if "mask_mod" in texts and self.chance(0.3) and "end" not in texts.get("origin", ""):
            texts["blocks"] = str(self.pick(BLOCKS))
        if self.chance(0.15):
            texts["sinks"] = self.array("sinks", (n,), "float32")
        if self.chance(0.15):
            texts["dropout"] = "flexjax.Dropout(0.25, jax.random.key(0))"
        heads_first = self.chance(0.3)
        if heads_first:
            texts["layout"] = "'BNTH'"
        shape = lambda heads, tokens, dim: (b, heads, tokens, dim) if heads_first else (b, tokens, heads, dim)
        dtype = self.pick(("bfloat16", "bfloat16", "float16", "float32"))
        if self.chance(0.1):
            texts["query_extra"] = self.array("extra", shape(n, t, 16), dtype)
            texts["key_extra"] = self.array("extra", shape(m, s, 16), dtype)
        if self.chance(0.2):
            texts["scale"] = "0.1"
        floats = [name for name, a in self.arrays.items() if jnp.issubdtype(a.dtype, jnp.floating)]
        wanted = ["query", "key", "value", *floats]
        if self.chance(0.2):
            wanted = [name for name in wanted if self.chance(0.5)] or wanted
        return RandomCall(
            *(shape(n, t, self.dim), shape(m, s, self.dim), shape(m, s, self.value_dim), dtype),
            *(self.arrays, texts, tuple(wanted), self.chance(0.2)),
        )

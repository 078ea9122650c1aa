"""`profile`: the measured time of one call beside what its work predicts on this device.

The roofline model (Williams, Waterman and Patterson, "Roofline", CACM 2009): a call takes at least the time of its
floating-point operations at the device's peak rate, and at least the time of its bytes at the device's memory
bandwidth. Both rates are measured in the same run, so that no table of devices is needed.
"""

import html
import math
import statistics
import time
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import core

from flexjax.attention import flex_attention as attend
from flexjax.backends import target as targets
from flexjax.call.arguments import Arguments, Keywords, arrays_of, check_keywords, describe_call, times_backward
from flexjax.call.prepare import prepare
from flexjax.errors import add_note_once, bad_argument, public
from flexjax.look.work import Work, work_of
from flexjax.mod_tools.settings import own
from flexjax.passes import dispatch
from flexjax.types import ArrayArgument, AuxRequest, Implementations, Operand, values_of

Array = jax.Array

clock = time.perf_counter  # seconds


class Pass(typing.NamedTuple):
    """One pass of the call: forward, or forward and backward together."""

    name: str  # "forward" or "both passes"
    seconds: float  # median time of a call
    calls: int  # how many were timed
    flops: float  # from the plan
    # seconds by the roofline; the bytes of both passes are taken as three times those of the forward pass
    predicted: float


class Profile(typing.NamedTuple):
    """What `profile` measured; print it for the table.

    passes        forward, and both passes where asked for
    work          blocks, operations and bytes of the call
    peak_flops    floating-point operations a second of a large matrix product in the dtype of the call, measured
    bandwidth     bytes a second of a large copy, read and written, measured
    first_call    seconds of the first call, compilation included
    """

    passes: tuple[Pass, ...]
    work: Work
    peak_flops: float
    bandwidth: float
    backend: str
    device: str
    first_call: float

    def __str__(self) -> str:
        """A table: device, roofline, work (and what bounds it), and each pass with predicted over measured time."""
        intensity, ridge = self.work.forward_flops / max(self.work.bytes, 1), self.peak_flops / self.bandwidth
        lines = [
            f"{self.backend} on {self.device}; first call {self.first_call:.2f} s",
            f"roofline: {self.peak_flops / 1e12:.4g} TFLOP/s, {self.bandwidth / 1e9:.4g} GB/s (measured)",
            f"work: {self.work.visited} of {self.work.total} blocks, {self.work.bytes / 1e6:.4g} MB, {intensity:.4g} "
            "FLOP a byte: " + ("bound by arithmetic" if intensity > ridge else "bound by memory"),
            f"{'pass':<12} {'measured':>12} {'predicted':>12} {'TFLOP/s':>9} {'of roofline':>12}",
        ]
        for p in self.passes:
            rate = p.flops / p.seconds / 1e12
            lines.append(
                f"{p.name:<12} {1e3 * p.seconds:9.3f} ms {1e3 * p.predicted:9.3f} ms {rate:9.4g} "
                f"{100 * p.predicted / p.seconds:11.1f}%"
            )
        if any(p.predicted > p.seconds for p in self.passes):
            lines.append("above 100%: the machine was busy while its roofline was measured; profile again")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@public
@own
def profile(
    query: Operand,
    key: Operand,
    value: Operand,
    *,
    backward: bool | None = None,
    seconds: float = 2.0,
    return_aux: AuxRequest | None = None,
    implementation: Implementations | None = None,
    **arguments: typing.Unpack[Keywords[ArrayArgument]],
) -> Profile:
    """Runs `flex_attention(query, key, value, ...)` and compares its time with the roofline of this device.

    query, key, value, return_aux, implementation, **arguments   as for flex_attention; concrete arrays
    backward         whether both passes are timed too, with a cotangent of ones; None: unless the inputs are float8
    seconds          for how long each pass is timed, 0 or more; at least 3 and at most 100 calls are

    Returns a Profile, whose str() is a table:

        print(flexjax.profile(q, k, v, mask_mod=flexjax.masks.causal))

    The operations are those of visited blocks at full lengths. Gradients are those of query, key and value alone.
    Raises what flex_attention would raise, TypeError for a keyword that it does not have, ValueError for tracers, bad
    seconds and backward=True with float8, and NotImplementedError for `context=` and arrays on several devices.
    """
    check_keywords("profile", typing.cast(dict, arguments))
    given = Arguments(query, key, value, return_aux=return_aux, **arguments)
    if any(isinstance(x, core.Tracer) for x in jax.tree.leaves((query, key, value))):
        raise bad_argument("query", "traced", "concrete arrays", "Call flexjax.profile outside of jit.")
    for name, x in ((name, x) for name, argument in given.given().items() for x in arrays_of(argument)):
        if isinstance(x, jax.ShapeDtypeStruct):
            raise bad_argument(
                name, f"the shape {x.dtype}{list(x.shape)}", "a concrete array, because profile runs the call",
                "Pass arrays, or take flexjax.explain, which predicts the work from shapes.",
            )  # fmt: skip
    try:
        call = prepare(given)
        with_backward = times_backward(backward, call.plan.float8)
        _check(seconds, *jax.tree.leaves((query, key, value)))
        target = targets.of_device(min(jnp.asarray(values_of(query)).devices(), key=lambda device: device.id))
        run = dispatch.choose(call.plan, dispatch.candidates(implementation), target)
        work = work_of(call, run)
        if work is None:
            raise bad_argument("block_mask", "traced", "concrete lists", "Call flexjax.profile outside of jit.")
    except Exception as error:
        add_note_once(error, describe_call("profile", given))
        raise

    def forward(query: Operand, key: Operand, value: Operand) -> Array:
        """The output array of the call, without the results that return_aux asks for, which are computed too."""
        if return_aux is None:
            return attend(query, key, value, implementation=implementation, **arguments)
        return attend(query, key, value, return_aux=return_aux, implementation=implementation, **arguments)[0]

    def both(query: Array, key: Array, value: Array) -> tuple[Array, tuple[Array, ...]]:
        out, pull = jax.vjp(forward, query, key, value)
        return out, pull(jnp.ones_like(out))

    peak, bandwidth = peak_flops(jnp.dtype(run.plan.input_dtype)), memory_bandwidth()
    passes = []
    first_call = 0.0
    for name, function, flops, moved in (
        ("forward", forward, work.forward_flops, work.bytes),
        ("both passes", both, work.forward_flops + work.backward_flops, 3 * work.bytes),
    )[: 2 if with_backward else 1]:
        step = jax.jit(function)
        took, calls, first = _timed(lambda step=step: step(query, key, value), seconds)
        first_call = first_call or first
        passes.append(Pass(name, took, calls, flops, max(flops / peak, moved / bandwidth)))
    return Profile(tuple(passes), work, peak, bandwidth, run.backend.name, target.name, first_call)


def peak_flops(dtype: jnp.dtype) -> float:
    """The measured rate of a large square matrix product in `dtype` on the default device, in operations a second."""
    n = 4096 if jax.default_backend() != "cpu" else 1024
    x = jnp.ones((n, n), dtype)
    # Both operands are summed over their last dimension, as queries and keys are: tensor cores multiply float8 in no
    # other order, and XLA converts float8 for `x @ x`.
    product = jax.jit(lambda x: jax.lax.dot_general(x, x, (((1,), (1,)), ((), ()))))
    return 2.0 * n**3 / _timed(lambda: product(x), 0.2)[0]


def memory_bandwidth() -> float:
    """The measured rate of a copy of an array larger than the caches on the default device: bytes a second."""
    n = 2**28 if jax.default_backend() != "cpu" else 2**25
    x = jnp.ones(n, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 8.0 * n / _timed(lambda: copy(x), 0.2)[0]


def _check(seconds: object, *arrays: ArrayArgument) -> None:
    """Raises ValueError for bad `seconds`, and NotImplementedError if one of the arrays is on several devices."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds < math.inf:
        raise bad_argument("seconds", repr(seconds), "a finite number of 0 or more", "2 is the default.")
    if any(isinstance(x, Array) and len(x.devices()) > 1 for x in arrays):
        raise NotImplementedError(
            "profile compares a call with the roofline of one device, and query, key or value is on several. Profile "
            "one device's share of the work."
        )


def _timed(call: Callable[[], object], seconds: float) -> tuple[float, int, float]:
    """(median seconds of the timed calls, how many these are, seconds of the first call), until results are ready."""
    # the first call, with its compilation, and a second one are not timed
    start = clock()
    jax.block_until_ready(call())
    first = clock() - start
    jax.block_until_ready(call())
    times: list[float] = []
    until = clock() + seconds
    while len(times) < 3 or (clock() < until and len(times) < 100):
        start = clock()
        jax.block_until_ready(call())
        times.append(clock() - start)
    return statistics.median(times), len(times), first

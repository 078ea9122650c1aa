"""What to write instead of what a mod must not do: errors of the user's function in the words of its author."""

import contextlib
import re
import types
from collections.abc import Callable, Iterator

import jax
from jax.core import Tracer

from flexjax.errors import ModError, add_note_once, shows_all_frames
from flexjax.trace.statement import advice, failed_at, item, up_to, where, where_made


@contextlib.contextmanager
def advised(name: str, mod: Callable, called: str = "") -> Iterator[None]:
    """Says of errors of the user's function `name` what to write, as a ModError; others pass, with a note of it."""
    try:
        yield
    except Exception as error:
        link = failed_at(error.__traceback__)
        if (why := _why(error, link)) is None:
            add_note_once(error, f"In `{name}`{called}.{where(link)}")
            raise
        shown = error.__traceback__ if shows_all_frames() else up_to(error.__traceback__, link)
        refused = ModError(f"`{name}` {why}{where(link) or where_made(mod)}").with_traceback(shown)
        raise refused from (error if shows_all_frames() else None)


def _why(error: Exception, link: types.TracebackType | None) -> str | None:
    """The rest of a sentence that begins with the mod, for what a mod must not do; None for other errors."""
    text = str(error)
    if isinstance(error, ModError):
        return f"cannot be compiled: {error}"
    for form, said in OF_JAX.items():
        if found := re.search(form, text):
            return said.format(*found.groups(), item(link))
    if isinstance(error, AttributeError):
        return (advice(link) or _no_attribute(error)) if isinstance(error.obj, Tracer) else None
    if isinstance(error, jax.errors.TracerArrayConversionError | jax.errors.TracerIntegerConversionError):
        return advice(link) or TO_NUMPY
    if isinstance(error, TypeError) and re.search(r"unhashable type: '\w*Tracer'", text):
        return advice(link) or IN_A_DICT
    # before TypeError in general, of which these are
    if isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.NonConcreteBooleanIndexError):
        return advice(link, isinstance(error, jax.errors.NonConcreteBooleanIndexError)) or IN_PYTHON
    if (isinstance(error, TypeError) and "immutable" in text) or (
        isinstance(error, IndexError) and re.search("static (start|integers)", text)
    ):
        return advice(link)
    if isinstance(error, IndexError) and re.search(r"size 0|empty axis", text):
        return "reads an array of size 0, which has no element to read; leave the read out where the array is empty."
    return None


OF_JAX = {
    r"Indexer must have integer or boolean type, got indexer with type (\w+)": (
        "indexes {1} by a number of type {0}; expected integers. Write `//` for `/`, or jnp.int32(x) around a number x."
    ),
    r"Too many indices: (?:array is )?(\d+)-dimensional.* (\d+) were indexed": (
        "indexes {2}, which has {0} dims, by {1} numbers; leave out the index for which it has no axis."
    ),
    r"Shapes must be 1D|(?:It|The error) arose in|argument of jnp|repeats must be static|known statically": (
        "gives {0} a size or an axis that is known only at run time; expected a Python int. Take the largest size, and "
        "leave out what is too much by jnp.where."
    ),
    r"unsupported format string passed to \w*Tracer|format: a real number is required, not \w*Tracer": (
        "writes a value into a text that is known only at run time; leave it out, or see values by jax.debug.print "
        "with implementation='reference'."
    ),
}
"""By what an error of jax or Python says, as a regular expression, the rest of the sentence: its fields are those of
the expression, then what is indexed or called there.
"""
TO_NUMPY = (
    "uses a traced value as a Python integer or hands it to numpy (it indexes a list, calls range() or np.*); use "
    "jax.numpy inside the mod and index arrays made by jnp.asarray."
)
IN_PYTHON = (
    "decides in Python (if, while, and, or, not, int()) on a value known only at run time; use jnp.where, &, | and ~ "
    "instead."
)
IN_A_DICT = (
    "looks a traced value up in a dict, a set or a cache; make an array of the values, values = jnp.asarray([...]), "
    "and read values[b]."
)


def _no_attribute(error: AttributeError) -> str:
    return (
        f"uses .{error.name} of a scalar, which JAX scalars do not have; use a function of jax.numpy, for example "
        "jnp.abs(x) for torch's x.abs() and jnp.clip(x, low, high) for x.clamp(low, high)."
    )

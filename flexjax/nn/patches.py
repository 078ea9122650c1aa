"""`Installed`: attributes of another library that are replaced until `uninstall()` or the end of a `with` block."""

import types
import typing
from collections.abc import Sequence

Replacement = tuple[object, str, object]  # (owner, name of its attribute, what takes its place)


class Installed:
    """The handle that an `install()` returns: the replacement holds from that call on.

    with handle:   puts the library's own functions back at the end of the block
    uninstall()    puts them back now; a second call does nothing
    RuntimeError   what took their place has been replaced since, so that putting them back would undo that
    """

    def __init__(self, replacements: Sequence[Replacement]) -> None:
        self._before = [(owner, name, getattr(owner, name), new) for owner, name, new in replacements]
        for owner, name, new in replacements:
            setattr(owner, name, new)

    def uninstall(self) -> None:
        for owner, name, _, new in self._before:
            if getattr(owner, name) is not new:
                raise RuntimeError(f"`{name}` was replaced again after this install(). Uninstall the later one first.")
        for owner, name, old, _ in reversed(self._before):
            setattr(owner, name, old)
        self._before = []

    def __enter__(self) -> typing.Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.uninstall()

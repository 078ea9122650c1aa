"""The xla backend accepts everything; see `conformance.py` for what that means."""

from tests.backends.conformance import Conformance


class TestXla(Conformance):
    implementation = "xla"

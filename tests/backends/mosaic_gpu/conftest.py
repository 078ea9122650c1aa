"""Every simulated GPU kernel of this folder runs with race detection."""

from tests.backends.races import races  # noqa: F401 (an autouse fixture)

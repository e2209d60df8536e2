"""Properties of every kernel (tests/properties), on every backend of this machine."""

from properties.blocks import *  # noqa: F403
from properties.dropout import *  # noqa: F403
from properties.empty_rows import *  # noqa: F403
from properties.extremes import *  # noqa: F403
from properties.garbage import *  # noqa: F403
from properties.long_sums import *  # noqa: F403
from properties.sinks import *  # noqa: F403
from properties.strides import *  # noqa: F403

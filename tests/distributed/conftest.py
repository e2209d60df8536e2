"""The modules beside the tests: processes that these start find their functions there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

"""Makes the scripts of `integration/testbed`, which are not part of the package, importable."""

import sys
from pathlib import Path

TESTBED = Path(__file__).parents[2] / "integration" / "testbed"
sys.path.insert(0, str(TESTBED))

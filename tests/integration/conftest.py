"""Makes the scripts of `integration/`, which are not part of the package, importable."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "integration" / "testbed"))
# Last, so that an installed eldr is still found before the checkout's.
sys.path.append(str(ROOT))

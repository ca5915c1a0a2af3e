"""``python -m benchmarks SUITE [options]``."""

import sys

from .suites import main

if __name__ == "__main__":
    sys.exit(main())

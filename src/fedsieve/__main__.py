"""`python -m fedsieve`."""

import sys

from fedsieve.cli import main

sys.exit(main())

"""`python -m fedsieve`."""

import sys

from fedsieve.cli.main import main

sys.exit(main())

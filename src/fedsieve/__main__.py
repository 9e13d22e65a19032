"""`python -m fedsieve`."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # `python -m` puts the working directory first, where a file could take the place of an installed package

from fedsieve.cli.main import main

sys.exit(main())

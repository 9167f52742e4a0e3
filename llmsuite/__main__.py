"""`python -m llmsuite`."""

import sys

from llmsuite.cli.main import main

sys.exit(main())

"""flower-superexec with task tokens in files: `python -m fedsieve.deployment.superexec`, options as in flower-superexec.

Flower's superexec starts server and client apps with the token of their task on the command line, which every user of the machine can
read; with the token of a server app one may submit runs.
"""

import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.supercore.cli import flower_superexec
from flwr.supercore.superexec.executor import subprocess_executor

from fedsieve.deployment.local_cluster import TOKEN_FILE_VARIABLE


def start_app(arguments: list[str], **options: Any) -> subprocess.Popen:
    """Start an app with the token of its task in a file that only its owner can read, beside the token of the run."""
    place = arguments.index("--token")
    descriptor, path = tempfile.mkstemp(dir=Path(os.environ[TOKEN_FILE_VARIABLE]).parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(arguments[place + 1])
    return subprocess.Popen([*arguments[:place], "--token-file", path, *arguments[place + 2 :]], **options)


if __name__ == "__main__":
    with_files = SimpleNamespace(Popen=start_app, DEVNULL=subprocess.DEVNULL)
    subprocess_executor.subprocess = with_files  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
    flower_superexec()

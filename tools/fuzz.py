"""`make fuzz`: search with atheris for input bytes that raise undocumented errors.

python tools/fuzz.py                 every target for a minute
python tools/fuzz.py packet 600      one target for ten minutes
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path


def fuzz_target(name: str, seconds: str) -> None:
    """Fuzz one target in this process until the time is over or an undocumented error is raised."""
    import atheris

    with atheris.instrument_imports(include=["fedsieve"]):
        from fuzz_targets import TARGETS
    corpus = tempfile.mkdtemp(prefix=f"fuzz-{name}-")
    for number, seed in enumerate(TARGETS[name].seeds):
        (Path(corpus) / f"seed-{number}").write_bytes(seed)
    options = [f"-max_total_time={seconds}", "-max_len=4096", "-rss_limit_mb=4096", "-print_final_stats=1", f"-artifact_prefix={corpus}/"]
    atheris.Setup([sys.argv[0], *options, corpus], TARGETS[name].accepts)
    atheris.Fuzz()


def main(name: str = "all", seconds: str = "60") -> int:
    """Fuzz one target in this process, or all targets in a process each."""
    if name != "all":
        fuzz_target(name, seconds)
        return 0
    from fuzz_targets import TARGETS

    found = 0
    for target in TARGETS:
        done = subprocess.run([sys.executable, __file__, target, seconds], capture_output=True, text=True, check=False)
        units = re.search(r"number_of_executed_units:\s*(\d+)", done.stderr)
        print(
            f"{target}: {units[1] if units else '?'} inputs, {'an undocumented error' if done.returncode else 'no undocumented error'}",
            flush=True,
        )
        if done.returncode:
            found += 1
            print(done.stdout[-2000:], done.stderr[-4000:], sep="\n")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

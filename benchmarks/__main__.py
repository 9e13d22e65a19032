"""`python -m benchmarks`: all measurements that take less than a few minutes."""

from benchmarks import wire

wire.main()

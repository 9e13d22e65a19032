"""The contenders: modules whose `prepare(workload)` returns a function that trains one round."""

"""Who is timed: each a module whose `prepare(workload)` hands back a function that trains one round."""

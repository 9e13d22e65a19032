"""How rounds run: the loop, the exchanges in memory, failures and privacy."""

"""Exchanges: who computes what the clients compute. They know the protocols, not the algorithms."""
